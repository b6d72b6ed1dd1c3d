"""The compile server: started by the first worker that needs it, ended with the last."""

import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from gt.core.settings import CompileSettings
from gt.core.signatures import Input, Signature
from gt.wire.private_files import make_private
from gt.worker.compilation.compile_units import CompileAnswer, CompileFailed, CompileUnit, UnitCall
from gt.worker.compilation.server_connection import CompileServerConnection
from gt.worker.compilation.server_process import find_compiler
from tests.subprocesses import finish, start
from tests.worker.compilation.recorded_units import meta_of, record

pytestmark = pytest.mark.timeout(300)
SETTINGS = CompileSettings(niceness=0)


def untraceable(size: int = 4) -> CompileUnit:
    """A unit that the server refuses before it runs a C++ compiler."""
    call = UnitCall(Signature("aten.nonzero.default", (Input(0),), {}, (), (), (), ()), (0,), (), (1,))
    return CompileUnit((call,), (meta_of(torch.ones(size)),), (), (1,))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "compile"
    wait_for(lambda: not (tmp_path / "compile").exists())


def wait_for(condition: object, seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def answers(connection: CompileServerConnection, count: int, taken: list[CompileAnswer]) -> list[CompileAnswer]:
    def has_all() -> bool:
        connection.poll()
        return len(taken) >= count

    wait_for(has_all)
    return taken


def server_of(directory: Path) -> psutil.Process:
    (found,) = [
        process for process in psutil.process_iter(["cmdline"]) if str(directory) in (process.info["cmdline"] or ())
    ]
    return found


def test_each_unit_gets_one_answer_for_all_who_ask(directory: Path) -> None:
    first, second = (
        CompileServerConnection(lambda: directory, SETTINGS),
        CompileServerConnection(lambda: directory, SETTINGS),
    )
    taken: list[CompileAnswer] = []
    others: list[CompileAnswer] = []
    first.submit(untraceable(), taken.append)
    first.submit(untraceable(), taken.append)
    second.submit(untraceable(), others.append)
    second.submit(untraceable(5), others.append)
    assert (first.waiting, second.waiting) == (1, 2)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    answers(first, 2, taken)
    answers(second, 2, others)
    assert (first.waiting, second.waiting) == (0, 0)
    assert all(isinstance(answer, CompileFailed) and answer.call == 0 for answer in (*taken, *others))
    assert len({answer.key for answer in (*taken, *others)}) == 2
    assert server_of(directory).nice() == psutil.Process().nice()
    second.close()
    first.close()


@pytest.mark.slow
def test_a_server_that_is_killed_is_replaced_twice(directory: Path) -> None:
    connection = CompileServerConnection(lambda: directory, SETTINGS)
    taken: list[CompileAnswer] = []
    connection.submit(untraceable(), taken.append)
    answers(connection, 1, taken)
    for size in (5, 6, 7):
        os.kill(server_of(directory).pid, signal.SIGSTOP)
        connection.submit(untraceable(size), taken.append)
        os.kill(server_of(directory).pid, signal.SIGKILL)
        answers(connection, size - 3, taken)
    *replaced, last = taken
    assert all(isinstance(answer, CompileFailed) and "traced" in answer.reason for answer in replaced)
    assert isinstance(last, CompileFailed)
    assert last.reason == "the compile server was ended by SIGKILL, for the third time"
    connection.close()


@pytest.mark.slow
def test_a_stopped_server_ends_with_its_last_worker(directory: Path) -> None:
    first, second = (
        CompileServerConnection(lambda: directory, SETTINGS),
        CompileServerConnection(lambda: directory, SETTINGS),
    )
    taken: list[CompileAnswer] = []
    for connection in (first, second):
        connection.submit(untraceable(), taken.append)
        answers(connection, 1, taken)
        taken.clear()
    server = server_of(directory)
    server.suspend()
    first.close()
    assert server.is_running() and directory.exists()
    second.close()
    assert server.status() == psutil.STATUS_ZOMBIE
    server.wait()
    assert not directory.exists()


@pytest.mark.slow
def test_a_unit_that_takes_too_long_is_given_up_with_the_limit(directory: Path) -> None:
    connection = CompileServerConnection(lambda: directory, CompileSettings(niceness=0, seconds=0.01))
    taken: list[CompileAnswer] = []
    connection.submit(record(lambda x: [x.sin().cos() + 1], [torch.ones(4)]).unit, taken.append)
    (answer,) = answers(connection, 1, taken)
    assert isinstance(answer, CompileFailed)
    assert answer.reason == "it took longer than 0.01 s (GT_COMPILE_TIMEOUT)"
    connection.close()


WORKER = """
import sys, time
from pathlib import Path
from gt.core.settings import CompileSettings
from gt.worker.compilation.server_connection import CompileServerConnection
from tests.worker.compilation.test_server_connection import untraceable
connection = CompileServerConnection(lambda: Path(sys.argv[1]), CompileSettings(niceness=0))
taken = []
connection.submit(untraceable(), taken.append)
while not taken:
    connection.poll()
    time.sleep(0.05)
print("answered", flush=True)
time.sleep(1000)
"""


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_server_ends_with_a_worker_that_is_killed(directory: Path, is_stopped: bool) -> None:
    worker = start("-c", WORKER, str(directory))
    assert worker.stdout is not None and worker.stdout.readline() == "answered\n"
    server = server_of(directory)
    if is_stopped:
        server.suspend()
    worker.kill()
    worker.communicate()
    wait_for(lambda: has_ended(server))


PARENT_OF_WORKERS = """
import os, signal, sys
from pathlib import Path
from gt.wire.lifeline import adopt_orphans

def start_worker():
    answer, output = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(output, sys.stdout.fileno())
        exec(WORKER)
    assert os.read(answer, 100) == b"answered\\n"
    return pid

def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

adopt_orphans()
starter, other = start_worker(), start_worker()
kill(starter)
server = int((Path(sys.argv[1]) / "process").read_text().split()[0])
print(server, flush=True)
os.kill(server, signal.SIGSTOP)
kill(other)
"""


@pytest.mark.slow
def test_a_stopped_server_whose_first_worker_has_ended_before_ends_with_the_parent_of_the_workers(
    directory: Path,
) -> None:
    code, out, err = finish(start("-c", f"WORKER = {WORKER!r}\n{PARENT_OF_WORKERS}", str(directory)), 100)
    assert code == 0, err
    wait_for(lambda: not psutil.pid_exists(int(out)) or has_ended(psutil.Process(int(out))))


def test_a_directory_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "compile").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="not a private directory"):
        make_private(tmp_path / "compile")


@pytest.mark.parametrize("environ", [{"PATH": "/nowhere"}, {"PATH": os.environ["PATH"], "CXX": "no-such-compiler"}])
def test_without_a_compiler_none_is_found(environ: dict[str, str]) -> None:
    assert find_compiler(environ) is None
