"""Workers that torchrun starts: what they read of its variables, and real runs of torchrun."""

import contextlib
import os
import signal
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

import gt
from gt.worker import task_ranks
from gt.worker.task_ranks import JoinTurn, Ranks, choose_device, choose_threads, read_ranks
from tests.subprocesses import running, start_interpreter, start_server, wait_until

FOUR = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"}


def test_ranks_are_read_of_torchruns_variables():
    assert read_ranks(FOUR) == Ranks(3, 1, 4, 2)


def test_a_worker_that_torchrun_did_not_start_has_no_ranks():
    assert read_ranks({"RANK": "3", "LOCAL_RANK": "1"}) is None


@pytest.mark.parametrize("changes", [{"RANK": "4"}, {"LOCAL_RANK": "x"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "-1"}])
def test_ranks_that_cannot_be_are_refused_by_name(changes):
    ((name, value),) = changes.items()
    with pytest.raises(gt.SettingsError, match=f"{name}={value}.*torchrun --nproc-per-node"):
        read_ranks(FOUR | changes)


def test_a_missing_rank_is_refused():
    with pytest.raises(gt.SettingsError, match=r"LOCAL_RANK=\(not set\)"):
        read_ranks({name: value for name, value in FOUR.items() if name != "LOCAL_RANK"})


@pytest.mark.parametrize(("gpus", "device"), [(0, ""), (1, "cuda:0"), (8, "cuda:5")])
def test_a_worker_takes_the_gpu_of_its_local_rank(monkeypatch, gpus, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(Ranks(13, 5, 16, 8), "pytorch") == device
    assert choose_device(Ranks(13, 5, 16, 8), "numpy") == ""


@pytest.mark.parametrize(
    ("cpus", "variables", "threads"),
    [
        (16, {"OMP_NUM_THREADS": "1"}, 4),  # torchrun's own value
        (16, {}, 4),
        (2, {"OMP_NUM_THREADS": "1"}, 1),
        (16, {"OMP_NUM_THREADS": "3"}, 0),  # the user's
    ],
)
def test_workers_of_a_machine_share_its_cpus(monkeypatch, cpus, variables, threads):
    monkeypatch.setattr(task_ranks, "usable_cpus", lambda: cpus)
    assert choose_threads(Ranks(0, 0, 8, 4), variables) == threads


@pytest.fixture
def agent_store():
    """The variables of a worker of two, with a store like that of torchrun's agent."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield FOUR | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    del store


def test_a_worker_waits_for_the_one_before_it(agent_store):
    first, second = [JoinTurn(Ranks(rank, 0, 2, 1), agent_store) for rank in (0, 1)]
    looks = []

    def is_stopping():
        looks.append(None)
        if len(looks) == 3:
            first.pass_on()
        return False

    first.wait(is_stopping)
    assert not looks
    second.wait(is_stopping)
    assert len(looks) >= 3
    second.pass_on()


def test_a_note_serves_once(agent_store, monkeypatch, caplog):
    """torchrun starts all workers anew when a machine comes or goes, with the same store and number of restarts."""
    monkeypatch.setattr(task_ranks, "TURN_SECONDS", 0.1)
    for is_late in (False, True):
        if not is_late:
            JoinTurn(Ranks(0, 0, 2, 1), agent_store).pass_on()
        JoinTurn(Ranks(1, 0, 2, 1), agent_store).wait(lambda: False)
        assert ("rank 0 has not joined; this worker joins without its turn" in caplog.text) == is_late


def test_a_worker_that_is_told_to_end_waits_no_longer(agent_store):
    JoinTurn(Ranks(1, 0, 2, 1), agent_store).wait(lambda: True)


def test_without_a_store_workers_join_as_they_come(agent_store, caplog):
    JoinTurn(Ranks(1, 0, 2, 1), FOUR).wait(lambda: False)
    JoinTurn(Ranks(1, 0, 2, 1), agent_store | {"MASTER_PORT": "none"}).wait(lambda: False)
    assert "workers may join in any order" in caplog.text


def start_torchrun(port, workers, *options, **environment):
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), *options]
    return start_interpreter(*arguments, "-m", "gt.worker", "-p", str(port), "--json", **environment)


def ranks_of(pids):
    """The ids of workers by RANK."""
    return [int(psutil.Process(pid).environ()["RANK"]) for pid in pids]


def listed():
    with contextlib.suppress(gt.WorkerLost):
        gt.ones(1).sum().item()
    return gt.workers()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the environment of processes")
def test_workers_of_torchrun_join_in_order_exchange_and_are_replaced_when_one_is_killed():
    server, port = start_server()
    agent = start_torchrun(port, 3, "--max-restarts", "1", GT_TRANSPORT="gloo")
    with running(agent, server):
        gt.connect(f"localhost:{port}", min_workers=3)
        try:
            first = gt.workers()
            assert ranks_of(each.pid for each in first) == [0, 1, 2]
            assert {each.device for each in first} <= {"cpu", "cuda:0", "cuda:1", "cuda:2"}
            x = gt.distribute(torch.arange(12.0), gt.mesh(3, ("w",)), "w")
            assert torch.equal(x.redistribute(placements="-").cpu(), torch.arange(12.0))
            os.kill(first[1].pid, signal.SIGKILL)  # torchrun ends the others, and starts all of them anew
            wait_until(lambda: [each.worker for each in listed()] == [3, 4, 5], 60, "the restart of the workers")
            with pytest.raises(gt.WorkerLost):
                x.cpu()
            again = listed()
            assert ranks_of(each.pid for each in again) == [0, 1, 2]
            y = gt.distribute(torch.arange(6.0), gt.mesh(3, ("w",)), "w")
            assert y.spec.mesh.workers == (3, 4, 5)
            assert torch.equal((y * 2).redistribute(placements="-").cpu(), torch.arange(6.0) * 2)
        finally:
            gt.shutdown()
