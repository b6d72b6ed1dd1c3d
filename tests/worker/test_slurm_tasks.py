"""Workers that srun starts: what they read of SLURM's variables."""

import pytest

from gt.worker import task_ranks
from gt.worker.task_ranks import Ranks, expand_counts, read_tasks, share_cpus

TASK = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


@pytest.mark.parametrize(("text", "counts"), [("8", [8]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])])
def test_tasks_of_nodes_are_read_in_slurms_notation(text, counts):
    assert expand_counts(text) == counts


def test_a_task_of_srun_has_ranks():
    assert read_tasks(TASK) == Ranks(5, 1, 7, 2)


@pytest.mark.parametrize("missing", list(TASK))
def test_a_process_that_is_no_task_has_none(missing):
    """A worker that somebody starts in a batch script has SLURM_LOCALID=0, as all others there."""
    assert read_tasks({name: value for name, value in TASK.items() if name != missing}) is None


@pytest.mark.parametrize(
    ("variables", "usable", "threads"),
    [
        ({"SLURM_CPUS_ON_NODE": "16"}, 64, 8),  # not bound: half of those of the job
        ({"SLURM_CPUS_ON_NODE": "16"}, 8, 8),  # bound to its half already
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_CPUS_PER_TASK": "3"}, 64, 3),
        ({"SLURM_CPUS_ON_NODE": "1"}, 4, 1),
        ({}, 4, 4),
        ({"SLURM_CPUS_ON_NODE": "16", "OMP_NUM_THREADS": "2"}, 64, 0),  # the user's choice
    ],
)
def test_tasks_of_a_node_share_the_cpus_of_the_job(monkeypatch, variables, usable, threads):
    monkeypatch.setattr(task_ranks, "usable_cpus", lambda: usable)
    assert share_cpus(Ranks(0, 0, 4, 2), variables) == threads
