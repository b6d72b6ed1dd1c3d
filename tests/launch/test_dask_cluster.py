"""Workers of GT on the workers of a real Dask cluster, whose workers are processes of this machine."""

import sys

import pytest

import gt
from tests.launch.launched import are_gone, compute, kill, listed, parent_of
from tests.subprocesses import finish, running, serving, start, wait_until
from tests.test_docs import LAUNCHED_PROGRAMS
from tests.test_docstrings import DOCSTRINGS, LAUNCHING, run_example

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Dask's own
    pytest.mark.skipif(sys.platform != "linux", reason="reads the parents of processes"),
]


@pytest.fixture(scope="module")
def dask():
    """A Dask cluster of two workers, and its client."""
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: make test-launchers")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
        ) as made,
        distributed.Client(made) as client,
    ):
        yield client


def test_workers_are_replaced_with_those_of_dask_and_one_that_comes_later_is_used(dask):
    with gt.launch.dask(dask) as cluster:
        workers = listed()
        assert len(workers) == 2 and compute()
        kill(workers[0].pid, 2)
        assert compute()
        kill(parent_of(listed()[0]), 2)  # Dask's nanny starts another worker
        assert compute()
        dask.cluster.scale(3)
        wait_until(lambda: len(listed()) == 3, 60, "the worker of the new Dask worker")
        assert compute()
        pids = [each.pid for each in workers + listed()]
        keys = cluster.keys
    assert are_gone(pids) and not keys.exists()
    assert dask.submit(sum, [1, 2]).result() == 3  # Dask goes on


def test_workers_join_a_server_that_runs_already(dask):
    with serving(0) as port, gt.launch.dask(dask, server=f"localhost:{port}", backend="numpy", connect=False) as made:
        assert made.keys is None
        gt.connect(made.address)
        assert compute()
        gt.shutdown()


def test_a_worker_that_cannot_start_is_named_with_its_output(dask):
    with pytest.raises(gt.WorkerLost, match=r"(?s)Dask worker tcp://127.* has not joined: .* code 1; it said:.*cuda"):
        gt.launch.dask(dask, device="cuda:77")


def test_without_workers_of_dask_the_wait_ends(monkeypatch, dask):
    monkeypatch.setenv("GT_TIMEOUT", "0.5")
    distributed = sys.modules["distributed"]
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=None, host="127.0.0.1") as made,
        distributed.Client(made) as client,
        pytest.raises(gt.ServerLost, match=r"after 0.5 s of waiting: the Dask cluster at tcp://127.* has no workers"),
    ):
        gt.launch.dask(client)


def test_a_client_is_asked_for(dask):
    with pytest.raises(gt.SettingsError, match=r"takes a distributed.Client, not 'tcp://x:8786'"):
        gt.launch.dask("tcp://x:8786")


def test_a_running_session_is_refused_before_anything_is_started(dask):
    gt.init()
    with pytest.raises(gt.SessionError, match=r"gt.shutdown\(\) before gt.launch.dask\(\)"):
        gt.launch.dask(dask)
    gt.shutdown()


PROGRAM = """
import os, sys, distributed, gt
client = distributed.Client(sys.argv[1])
gt.launch.dask(client)
print(gt.ones(3).sum().item(), *[each.pid for each in gt.workers()], flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_program_that_ends_leaves_no_workers(dask, how):
    program = start("-c", PROGRAM, dask.scheduler.address, how)
    with running(program):
        code, out, err = finish(program, 120)
    assert code == (0 if how == "ended" else -9), err
    total, *pids = out.split()
    assert total == "3.0"
    wait_until(lambda: are_gone(map(int, pids)), 30, "the end of the workers")


@pytest.mark.parametrize("name", sorted(name for name in LAUNCHING if "gt.launch.dask(" in DOCSTRINGS[name]))
def test_the_example_of_a_public_name_runs(name, dask):
    assert run_example(name, DOCSTRINGS[name]) == ""


def test_the_program_of_the_page_runs(dask, capsys):
    (program,) = [snippet for snippet in LAUNCHED_PROGRAMS if snippet.info == "python dask"]
    exec(compile(program.code, "train.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "torch.Size([1000, 1000])\n2\n"
