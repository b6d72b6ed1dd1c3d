"""What SLURM tells the workers that srun starts: which task of its node each one is, and so its GPU and its CPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from gt.core.cpus import usable_cpus
from gt.worker.torchrun import Ranks


def read_tasks(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """The ranks of a task of srun; None for another process, such as one of a batch script, whose local id is 0 as
    well."""
    if "SLURM_STEP_ID" not in environ:
        return None
    try:
        counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
        local = int(environ["SLURM_LOCALID"]), counts[int(environ["SLURM_NODEID"])]
        return Ranks(int(environ["SLURM_PROCID"]), local[0], sum(counts), local[1])
    except (KeyError, ValueError, IndexError):
        return None  # the worker chooses for itself


def expand_counts(text: str) -> list[int]:
    """The tasks of each node, which SLURM writes as `2(x3),1`."""
    found = [re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part) for part in text.split(",")]
    return [int(each[1]) for each in found if each is not None for _ in range(int(each[2] or 1))]


def share_cpus(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> int:
    """The share of a worker in the CPUs that the job has on its node; 0 (OMP_NUM_THREADS) if the user has chosen."""
    if environ.get("OMP_NUM_THREADS"):
        return 0
    own = environ.get("SLURM_CPUS_PER_TASK", "")
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    share = int(own) if own.isdecimal() else int(on_node) // ranks.local_world_size if on_node.isdecimal() else 1 << 20
    # SLURM may have bound the task to some CPUs, or not
    return max(1, min(share, usable_cpus()))
