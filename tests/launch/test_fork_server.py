"""Workers are forked from one process, and end with it, with their program, or alone."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from multiprocessing.connection import Pipe
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

import gt
from gt.client import active_session
from gt.wire import shared_memory
from gt.wire.worker_status import WorkerStatus
from tests.subprocesses import ROOT, finish, start, start_interpreter, wait_until


@pytest.fixture
def temporary(monkeypatch):
    """An empty directory for temporary files."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield directory


@contextmanager
def two_workers():
    """The processes of two workers."""
    gt.init(workers=2)
    try:
        yield [psutil.Process(info.pid) for info in active_session.current().workers]
    finally:
        gt.shutdown()


def fork_server():
    """The process that forks workers. It has no command line for a moment after it was started, and programs of other
    tests may have ended, and wait for somebody to ask how."""
    found: list[psutil.Process] = []

    def find():
        children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        found[:] = [child for child in children if "fork_server" in " ".join(child.cmdline())]
        return found

    wait_until(find, what="the fork server")
    (process,) = found
    return process


def wait_for_the_end(processes):
    wait_until(lambda: not any(map(psutil.pid_exists, (process.pid for process in processes))), what="the end")


def assert_nothing_is_left(directory, processes):
    wait_for_the_end(processes)
    wait_until(lambda: os.listdir(directory) == [], what="the removal of the directory")
    assert [path for process in processes for path in shared_memory._DIRECTORY.glob(f"gt-{process.pid}-*")] == []


# The processes


def test_workers_are_forked_from_one_process_with_one_thread_and_share_its_memory():
    """Threads of the fork server would be missing in the workers, and the locks that they held would stay locked. The
    threads of OpenBLAS end before a fork."""
    with two_workers() as workers:
        server = fork_server()
        assert {child.pid for child in server.children()} == {worker.pid for worker in workers}
        assert server.num_threads() == 1
        names = {Path(f"/proc/{worker.pid}/comm").read_text().strip() for worker in workers}
        assert names == {"gt-worker-0", "gt-worker-1"}
        for worker in workers:
            assert os.getsid(worker.pid) == worker.pid
            memory = worker.memory_full_info()
            assert memory.uss < memory.rss / 2


IMPORTS = """
import os, torch
def refuse(*_, **__):
    raise AssertionError("CUDA was used")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = refuse
import gt.worker.fork_server
print(len(os.listdir("/proc/self/task")))
"""


def test_the_imports_of_the_fork_server_start_no_thread_and_do_not_use_cuda():
    code, out, err = finish(start_interpreter("-c", IMPORTS, OPENBLAS_NUM_THREADS="1"))
    assert (code, out) == (0, "1\n"), err


def test_a_worker_computes_with_several_threads_after_the_fork():
    """A pool of threads from before the fork would hang."""
    gt.init(workers=1)
    try:
        worker = psutil.Process(active_session.current().workers[0].pid)
        before = worker.num_threads()
        x = torch.rand(600, 600)
        torch.testing.assert_close((gt.to(x) @ gt.to(x)).softmax(0).cpu(), (x @ x).softmax(0))
        assert worker.num_threads() >= before + min(os.cpu_count() or 1, 2) - 1
    finally:
        gt.shutdown()


def test_a_worker_computes_with_the_cpus_that_the_program_may_use(one_cpu):
    gt.init(workers=1)
    try:
        command = psutil.Process(active_session.current().workers[0].pid).cmdline()
        assert command[command.index("--threads") + 1] == "1"
    finally:
        gt.shutdown()


TELLS = """
import json, os, random, signal, sys, torch
from gt.worker import fork_server
def tell(arguments):
    numbers = [random.random(), torch.rand(1).item()]
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    print(json.dumps([arguments, numbers, blocked, os.environ.get("NAME")]), file=sys.stderr)
    return 7
fork_server.run_worker = tell
fork_server.main()
"""


def test_what_workers_are_given(tmp_path):
    """Their options and environment, a log and random numbers of their own; and the client is told of both."""
    ours, theirs = Pipe()
    options = [str(tmp_path), "--client", str(os.getpid()), "--workers", "2", "--gpus", "2", "--threads", "3"]
    command, environment = [sys.executable, "-c", TELLS, *options], {**os.environ, "NAME": "a value"}
    with subprocess.Popen(command, stdin=theirs.fileno(), cwd=ROOT, env=environment) as server:
        assert ours.poll(60)
        reports = [msgspec.json.decode(ours.recv_bytes(), type=WorkerStatus) for _ in range(4)]
        server.terminate()
        assert server.wait(20) == 0
    ours.close(), theirs.close()
    assert sorted((report.number, report.exit_code) for report in reports if report.exit_code is not None) == [
        (0, 7),
        (1, 7),
    ]
    told = [json.loads((tmp_path / f"worker-{number}.log").read_text()) for number in range(2)]
    for number, (given, _, blocked, name) in enumerate(told):
        assert given == ["--threads", "3", "--device", f"cuda:{number}", "--lifeline", str(tmp_path)]
        assert (blocked, name) == ([], "a value")
    assert len({number for _, numbers, _, _ in told for number in numbers}) == 4


# The start, which the client does not wait for


WAITS = """
import sys, time
from pathlib import Path
while "gt.worker" in " ".join(sys.orig_argv) and not Path({path!r}).exists():
    time.sleep(0.02)
"""


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A path: workers wait in their start until there is a file."""
    path = tmp_path / "released"
    (tmp_path / "sitecustomize.py").write_text(WAITS.format(path=str(path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def test_the_first_use_waits_for_the_workers_and_init_does_not(released):
    gt.init(workers=2)
    try:
        for again in (lambda: gt.init(workers=2), lambda: gt.gpu_workers(2)):
            with pytest.raises(gt.SessionError, match="running already"):
                again()
        released.touch()
        assert len(gt.mesh(2).workers) == 2
        assert gt.ones(3).sum().item() == 3
    finally:
        gt.shutdown()


def test_a_program_may_end_before_its_workers_have_started(released, temporary):
    gt.init(workers=2)
    server = fork_server()
    gt.shutdown()
    assert_nothing_is_left(temporary, [server])
    with pytest.raises(gt.SessionError, match="was shut down"):
        gt.ones(3)


def test_a_process_that_is_forked_while_workers_start_leaves_them_to_its_parent(released):
    gt.init(workers=1)
    try:
        child = os.fork()
        if not child:
            try:
                gt.ones(3)
            except gt.SessionError as error:
                gt.shutdown()
                os._exit(42 if "was forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        released.touch()
        assert gt.ones(3).sum().item() == 3
    finally:
        gt.shutdown()


FAILS = """
import os, sys
def fail(arguments):
    print("no room on this machine", file=sys.stderr)
    return 3
def replace():
    sys.modules["gt.worker.fork_server"].run_worker = fail
if "gt.worker" in " ".join(sys.orig_argv):
    os.register_at_fork(after_in_child=replace)
"""


def test_a_worker_that_ends_at_its_start_is_an_error_of_the_first_use_and_gt_stays_closed(
    tmp_path, temporary, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(FAILS)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        gt.init(workers=2)
    pattern = r"(?s)worker [01] \(pid \d+\) ended with exit code 3 while starting; it said:.*no room on this machine"
    with pytest.raises(gt.WorkerLost, match=pattern) as caught:
        gt.ones(3)
    assert caught.traceback[-1].path == Path(__file__)
    with pytest.raises(gt.SessionError, match=r"(?s)could not start: .*no room.*call gt.init\(\)"):
        gt.ones(3)
    assert_nothing_is_left(temporary, [])
    gt.init()
    try:
        assert gt.ones(3).sum().item() == 3
    finally:
        gt.shutdown()


# Ends


def test_workers_do_not_end_with_the_thread_that_started_them():
    thread = threading.Thread(target=lambda: (gt.init(workers=1), gt.synchronize()))
    thread.start()
    thread.join()
    try:
        assert [gt.ones(3).sum().item() for _ in range(3)] == [3, 3, 3]
    finally:
        gt.shutdown()


@pytest.mark.parametrize("stops", [False, True], ids=["running", "stopped"])
def test_workers_end_with_their_fork_server(stops, temporary, fault):
    with two_workers() as workers:
        server = fork_server()
        x = gt.distribute(torch.ones(4), gt.mesh(2), [gt.Shard(0)])
        gt.synchronize()
        if stops:
            workers[0].suspend()
        server.kill()
        wait_for_the_end(workers)
        with pytest.raises(gt.WorkerLost) as caught:
            x.sum().item()
        text = str(caught.value)
        assert f"was killed, since its fork server (pid {server.pid}) was killed by SIGKILL" in text
        if not stops:
            fault("the fork server of a program is killed", f"`WorkerLost`: {text.replace('worker 1', 'worker 0')}")
    assert_nothing_is_left(temporary, [server, *workers])


def test_the_last_output_of_a_killed_worker_is_shown(monkeypatch):
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    gt.init(workers=1)
    try:
        x = gt.ones(3)
        gt.synchronize()
        os.kill(active_session.current().workers[0].pid, signal.SIGABRT)
        with pytest.raises(gt.WorkerLost, match=r"(?s)was killed by SIGABRT; it said:.*Fatal Python error: Aborted"):
            while True:
                x.sum().item()
    finally:
        gt.shutdown()


@pytest.mark.parametrize("stopped", ["fork server", "worker"])
def test_a_stopped_process_ends_at_shutdown(stopped, temporary, monkeypatch):
    if stopped == "fork server":  # it is killed after this time; a fork server that runs gives its workers as much
        monkeypatch.setattr("gt.launch.local_processes.GRACE_SECONDS", 0.0)
    with two_workers() as workers:
        server = fork_server()
        (server if stopped == "fork server" else workers[1]).suspend()
    assert_nothing_is_left(temporary, [server, *workers])


PROGRAM = """
import gt, os, psutil, signal
from gt.client import active_session
gt.init(workers=2)
(server,) = psutil.Process().children()
{use}
print(server.pid, *[child.pid for child in server.children()], flush=True)
{ending}
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_program(use, ending, directory):
    code, out, err = finish(start("-c", PROGRAM.format(use=use, ending=ending), TMPDIR=directory))
    assert code == -signal.SIGKILL, err
    return [int(pid) for pid in out.split()]


def test_workers_of_a_killed_program_end_if_their_fork_server_is_stopped(temporary):
    server, *workers = run_program("gt.ones(3).sum().item()", "server.suspend()", temporary)
    try:
        assert len(workers) == 2
        wait_until(lambda: os.listdir(temporary) == [], what="the removal of the directory")
        wait_until(lambda: not any(map(is_at_work, workers)), what="the end of the workers")
    finally:
        os.kill(server, signal.SIGKILL)


def is_at_work(pid):
    """Whether a process runs: one that has ended stays a zombie as long as its parent is stopped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_a_program_that_is_killed_while_its_workers_start(temporary):
    server, *workers = run_program("", "", temporary)
    assert workers == []
    wait_until(lambda: not is_at_work(server), what="the end of the fork server")
    wait_until(lambda: os.listdir(temporary) == [], what="the removal of the directory")
