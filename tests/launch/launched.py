"""What tests of launchers share: processes that workers run in, and their replacement."""

import contextlib
import os
import signal

import psutil
import torch

import gt
from tests.subprocesses import wait_until


def listed():
    """The workers that are ready, after a read that lets the session receive the latest."""
    with contextlib.suppress(gt.WorkerLost):
        gt.ones(1).sum().item()
    return [each for each in gt.workers() if each.state == "ready"]


def parent_of(worker):
    """The process that runs a worker: an actor of Ray, or a worker of Dask."""
    return psutil.Process(worker.pid).ppid()


def kill(pid, count):
    """Kill a process, and wait until there are so many workers again, of which one is new."""
    before = {each.worker for each in listed()}
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(now := listed()) == count and max(each.worker for each in now) > max(before), 60, "another")


def compute():
    """Whether all workers take part in a result that equals torch's."""
    workers = [each.worker for each in listed()]
    x = torch.arange(24.0).view(6, 4)
    ours = gt.distribute(x, gt.mesh(len(workers), ("w",)), "w, -")
    assert ours.spec.mesh.workers == tuple(workers)
    return torch.equal((ours @ ours.T).cpu(), x @ x.T)


def are_gone(pids):
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
