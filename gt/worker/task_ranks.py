"""What torchrun and srun tell the workers that they start: the rank of each one, its device and its share of the
CPUs."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from gt.core.environment import usable_cpus
from gt.core.errors import SettingsError


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


log = logging.getLogger("gt.worker")
TURN_SECONDS = 60.0  # after which a worker joins without waiting for the one before it
_NOTICE_SECONDS = 10.0
_POLL_SECONDS = 0.02
_STORE_TIMEOUT = timedelta(seconds=10)
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Ranks(msgspec.Struct, frozen=True):
    """The number of a worker among all that torchrun has started, and among those of its machine."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def read_ranks(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """The ranks of this process; None if torchrun has not started it. Raises SettingsError if they cannot be."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    try:
        ranks = Ranks(*[int(environ[name]) for name in _VARIABLES])
    except (KeyError, ValueError):
        ranks = Ranks(-1, -1, 0, 0)
    if not (0 <= ranks.rank < ranks.world_size and 0 <= ranks.local_rank < ranks.local_world_size):
        found = ", ".join(f"{name}={environ.get(name, '(not set)')}" for name in _VARIABLES)
        raise SettingsError(
            f"torchrun numbers its workers by environment variables, and {found} number none; start workers with "
            f"`torchrun --nproc-per-node N -m gt.worker`, or unset TORCHELASTIC_RUN_ID for one that you start yourself"
        )
    return ranks


def choose_device(ranks: Ranks, backend: str) -> str:
    """The GPU of a worker, by its number on its machine; "" (the engine's choice) where there is none."""
    gpus = torch.cuda.device_count() if backend == "pytorch" else 0
    return f"cuda:{ranks.local_rank % gpus}" if gpus else ""


def choose_threads(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> int:
    """The share of a worker in the CPUs of its machine; 0 (OMP_NUM_THREADS) if the user has chosen. Without a choice,
    torchrun sets OMP_NUM_THREADS=1."""
    if environ.get("OMP_NUM_THREADS", "1") != "1":
        return 0
    return max(1, usable_cpus() // ranks.local_world_size)


class JoinTurn:
    """Lets workers join in the order of RANK: each waits for a note of the one before it. The order is a convenience:
    where there are no notes, workers join as they come, and one that is alone has no turn."""

    def __init__(self, ranks: Ranks, environ: Mapping[str, str] = os.environ) -> None:
        self._ranks = ranks
        self._prefix = f"gt/{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._has_joined = False
        self._store = _open_store(environ) if ranks.world_size > 1 else None

    def wait(self, is_stopping: Callable[[], bool]) -> None:
        """Wait until the worker of the rank before this one has joined, for at most TURN_SECONDS."""
        if self._has_joined or self._store is None or not self._ranks.rank:
            return
        before = self._ranks.rank - 1
        start = time.monotonic()
        notice = start + _NOTICE_SECONDS
        while not is_stopping() and not self._take_note(before):
            now = time.monotonic()
            if now > start + TURN_SECONDS:
                log.warning("rank %d has not joined; this worker joins without its turn", before)
                return
            if now > notice:
                log.warning("waiting for rank %d to join first, for at most %g s", before, TURN_SECONDS)
                notice = start + TURN_SECONDS
            time.sleep(_POLL_SECONDS)

    def _take_note(self, rank: int) -> bool:
        """Whether the worker of a rank has joined, or its note cannot be read. A note is removed by the worker that
        waits for it: torchrun may start all workers anew with the same store."""
        assert self._store is not None
        key = f"{self._prefix}/{rank}"
        try:
            return bool(self._store.check([key])) and bool(self._store.delete_key(key))
        except RuntimeError as error:
            self._give_up(error)
            return True

    def pass_on(self) -> None:
        """This worker has joined: it is the turn of the next one. A worker that joins again has no turn."""
        if self._store is not None and not self._has_joined and self._ranks.rank + 1 < self._ranks.world_size:
            try:
                self._store.set(f"{self._prefix}/{self._ranks.rank}", "joined")
            except RuntimeError as error:
                self._give_up(error)
        self._has_joined, self._store = True, None

    def _give_up(self, error: Exception) -> None:
        log.warning("the store of torchrun does not answer (%s); workers may join in any order", error)
        self._store = None


def _open_store(environ: Mapping[str, str]) -> dist.TCPStore | None:
    """The store of torchrun's agent; None if it has none, or cannot be reached."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    try:
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        log.warning(
            "the store of torchrun at %s:%s cannot be used (%s); workers may join in any order", host, port, error
        )
        return None
