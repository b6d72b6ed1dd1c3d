"""Programs and workers that end, are killed or interrupted: no process hangs, and no file is left."""

import os
import signal
import tempfile
import threading
import time

import psutil
import pytest
import torch

import gt
from gt.client import active_session
from gt.wire import shared_memory
from tests.subprocesses import finish, start, wait_until


def workers():
    return {info.worker: info for info in active_session.current().welcome.workers}


def workers_of(tensor):
    return tensor.spec.mesh.workers


def test_a_killed_worker_is_named_with_its_end_and_its_last_op(fault):
    gt.init(workers=2)
    try:
        kept, lost = gt.ones(10), None
        while lost is None or workers_of(lost) == workers_of(kept):
            lost = gt.ones(10).cumsum(0)
        gt.synchronize()
        victim = workers_of(lost)[0]
        os.kill(workers()[victim].pid, signal.SIGKILL)
        start_time = time.monotonic()
        with pytest.raises(gt.WorkerLost) as found:
            while True:
                lost.sum().item()
        assert time.monotonic() - start_time < 10
        text = str(found.value)
        assert f"worker {victim} (pid {workers()[victim].pid}) was killed by SIGKILL" in text
        assert "its last op was aten." in text
        assert "test_process_ends.py" in text
        assert kept.sum().item() == 10
        with pytest.raises(gt.WorkerLost):
            (lost + kept).tolist()
        assert (gt.ones(3) + kept[0]).sum().item() == 6
        fault("a worker of a program is killed", "`WorkerLost`: " + text.replace(f"worker {victim}", "worker 1"))
        fault("tensors of the workers that are left", "can be read and used")
    finally:
        gt.shutdown()


def test_a_worker_killed_in_the_middle_of_work():
    gt.init(workers=1)
    try:
        x = gt.randn(1200, 1200)
        for _ in range(60):
            x = (x @ x) * 1e-3
        session = active_session.current()
        session.outbox.flush()
        os.kill(workers()[0].pid, signal.SIGKILL)
        start_time = time.monotonic()
        with pytest.raises(gt.WorkerLost, match="SIGKILL"):
            x.sum().item()
        assert time.monotonic() - start_time < 10
        with pytest.raises(gt.WorkerLost):
            gt.synchronize()
    finally:
        gt.shutdown()


def test_a_long_wait_prints_the_worker_that_it_waits_for(capfd, monkeypatch):
    monkeypatch.setattr("gt.client.inbox.NOTICE_SECONDS", 1.0)
    gt.init(workers=1)
    process = psutil.Process(workers()[0].pid)
    try:
        x = gt.ones(3).exp()
        gt.synchronize()
        process.suspend()
        sums: list[float] = []
        reading = threading.Thread(target=lambda: sums.append(x.sum().item()))
        reading.start()
        printed: list[str] = []

        def is_told() -> bool:
            printed.append(capfd.readouterr().err)
            return "worker 0, which was stopped at aten." in "".join(printed)

        wait_until(is_told, what="the name of the worker that is waited for")
        process.resume()
        reading.join(60)
        assert sums[0] > 0 and "waiting for" in "".join(printed)
    finally:
        process.resume()
        gt.shutdown()


def test_a_worker_that_dies_at_start_shows_its_last_output(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'gt.worker' in ' '.join(sys.orig_argv): raise SystemExit('no room on this machine')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    gt.init(workers=1)
    with pytest.raises(
        gt.WorkerLost, match=r"(?s)worker 0 .*ended with exit code 1 while starting.*no room on this machine"
    ):
        gt.ones(3)


SCRIPT = """
import gt, os, signal, sys, time
from gt.client import active_session
x = gt.ones(3)
print(*[info.pid for info in active_session.current().welcome.workers], flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("print(x.sum().item())", 0),
        ("raise ValueError('the program fails')", 1),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os._exit(5)", 5),
        ("gt.shutdown()", 0),
    ],
)
def test_no_process_outlives_the_program(ending, code):
    done, out, _ = finish(start("-c", SCRIPT.format(ending=ending), GT_WORKERS="2"))
    pids = [int(text) for text in out.splitlines()[0].split()]
    assert len(pids) == 2
    assert done == code
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), what=f"the end of {pids}")


UPLOADS = """
import torch
y = gt.ones(1500, 1500)
for _ in range(60): y = y @ y * 1e-3
kept = [gt.to(torch.ones(1 << 20)) for _ in range(4)]
active_session.current().outbox.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_program_that_is_killed_before_workers_have_taken_its_tensors(fault):
    with tempfile.TemporaryDirectory() as directory:
        process = start("-c", SCRIPT.format(ending=UPLOADS), GT_WORKERS="2", TMPDIR=directory)
        _, out, _ = finish(process)
        pids = [process.pid, *map(int, out.splitlines()[0].split())]
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), what=f"the end of {pids}")
        assert os.listdir(directory) == []
    assert [path for pid in pids for path in shared_memory._DIRECTORY.glob(f"gt-{pid}-*")] == []
    fault(
        "a program is killed in the middle of an upload", "its workers end; no process, shared buffer or socket is left"
    )


FORKS = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_killed_program_whose_child_lives_on():
    """The child holds the lifeline of the workers, which notice the end of the program all the same."""
    with tempfile.TemporaryDirectory() as directory:
        script = SCRIPT.format(ending=FORKS)
        process = start("-c", script, GT_WORKERS="1", TMPDIR=directory)
        worker, child = (int(process.stdout.readline()) for _ in range(2))
        try:
            wait_until(lambda: not psutil.pid_exists(worker), 10, f"the end of {worker}")
            wait_until(lambda: os.listdir(directory) == [], 10, "the end of the fork server")
        finally:
            os.kill(child, signal.SIGKILL)
        finish(process)


STOPS = """
os.kill(active_session.current().welcome.workers[0].pid, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stopped_worker_does_not_outlive_a_killed_program(fault):
    with tempfile.TemporaryDirectory() as directory:
        _, out, _ = finish(start("-c", SCRIPT.format(ending=STOPS), GT_WORKERS="2", TMPDIR=directory))
        pids = [int(text) for text in out.splitlines()[0].split()]
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), what=f"the end of {pids}")
        wait_until(lambda: os.listdir(directory) == [], what="the removal of the directory")
    fault("a program is killed while a worker of it is stopped", "all its workers end, and nothing is left of them")


def test_ctrl_c_interrupts_a_wait():
    work = "y = gt.randn(1500, 1500)\nfor _ in range(400): y = y @ y * 1e-3\n"
    script = SCRIPT.format(ending=work + "print('waiting', flush=True)\ny.sum().item()")
    process = start("-c", script, GT_WORKERS="1")
    pids = [int(text) for text in process.stdout.readline().split()]
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, 20)
    assert "KeyboardInterrupt" in err
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), what=f"the end of {pids}")


def test_gpu_workers_before_the_first_tensor():
    gt.gpu_workers(2)
    try:
        x = gt.ones(4)
        assert len(workers()) == 2
        assert x.sum().item() == 4
    finally:
        gt.shutdown()


def test_without_shared_memory(monkeypatch):
    monkeypatch.setenv("GT_TRANSPORT", "gloo")
    gt.init(workers=1)
    try:
        value = torch.randn(5_000_000)
        assert torch.equal(gt.to(value).cpu(), value)
    finally:
        gt.shutdown()
