"""Workers are forked from one process, and end with it, with their program, or alone."""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import gt
from gt.client import session as sessions
from gt.wire import shared_memory
from tests.subprocesses import finish, start, wait_until


@pytest.fixture
def workers():
    """The processes of two workers."""
    gt.init(workers=2)
    yield [psutil.Process(info.pid) for info in sessions.current().workers]
    gt.shutdown()


def fork_server():
    (process,) = [child for child in psutil.Process().children() if "gt.worker.fork_server" in " ".join(child.cmdline())]
    return process


def is_gone(process):
    return not psutil.pid_exists(process.pid) or process.status() == psutil.STATUS_ZOMBIE


# The processes


def test_workers_are_children_of_one_process_that_has_one_thread(workers):
    """Threads of the fork server would be missing in the workers, and with them the locks that they held. Those of
    OpenBLAS end before a fork."""
    server = fork_server()
    assert sorted(child.pid for child in server.children()) == sorted(worker.pid for worker in workers)
    assert server.num_threads() == 1


IMPORTS = """
import os, torch
def refuse(*_, **__):
    raise AssertionError("CUDA was used")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = refuse
import gt.worker.fork_server
print(len(os.listdir("/proc/self/task")))
"""


def test_the_imports_of_the_fork_server_start_no_thread_and_do_not_use_cuda():
    code, out, err = finish(start("-c", IMPORTS, OPENBLAS_NUM_THREADS="1"))
    assert (code, out) == (0, "1\n"), err


def test_each_worker_has_a_session_of_its_own_and_a_name(workers):
    sessions_of_processes = {os.getsid(process.pid) for process in workers}
    assert sessions_of_processes == {process.pid for process in workers}
    names = {Path(f"/proc/{process.pid}/comm").read_text().strip() for process in workers}
    assert names == {"gt-worker-0", "gt-worker-1"}


def test_workers_share_the_memory_of_what_was_imported(workers):
    for process in workers:
        memory = process.memory_full_info()
        assert memory.uss < memory.rss / 2


def test_torch_computes_with_several_threads_after_the_fork():
    """A pool of threads from before the fork would hang here."""
    gt.init(workers=1)
    try:
        (worker,) = [psutil.Process(info.pid) for info in sessions.current().workers]
        before = worker.num_threads()
        x = torch.rand(600, 600)
        torch.testing.assert_close((gt.to(x) @ gt.to(x)).softmax(0).cpu(), (x @ x).softmax(0))
        assert worker.num_threads() - before >= min(os.cpu_count(), 2) - 1
    finally:
        gt.shutdown()


SEEDED = """
import random, sys
from pathlib import Path
import torch
from gt.worker import process
run = process.WorkerProcess.run
def note(self):
    directory = Path(sys.argv[1])
    text = f"{random.random()} {torch.rand(1).item()} {torch.get_num_threads()}"
    (directory / Path('/proc/self/comm').read_text().strip()).write_text(text)
    run(self)
process.WorkerProcess.run = note
"""


def test_each_worker_has_random_numbers_and_a_share_of_the_cores_of_its_own(tmp_path, monkeypatch):
    ...


# Ends
