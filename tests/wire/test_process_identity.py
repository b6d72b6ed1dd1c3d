"""Processes of this machine are known to run until they end, whatever their names and later pids."""

import os
import subprocess
import sys

import pytest

from gt.wire.process_identity import is_running, start_mark, this_host
from tests.subprocesses import finish, start


@pytest.fixture
def child():
    """A process that waits for the end of its standard input."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.stdin.close()
    process.wait(timeout=60)


def test_a_process_is_running_until_it_ends(child):
    mark = start_mark(child.pid)
    assert is_running(child.pid, mark)
    child.stdin.close()
    child.wait(timeout=60)
    assert not is_running(child.pid, mark)


def test_a_process_that_ended_and_was_not_waited_for_is_not_running(child):
    mark = start_mark(child.pid)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(child.pid, mark)


def test_a_later_process_with_the_same_pid_is_another(child):
    assert not is_running(child.pid, start_mark(child.pid) + "0")


def test_a_process_that_ended_before_it_was_looked_at_is_not_running(child):
    child.stdin.close()
    child.wait(timeout=60)
    assert start_mark(child.pid) == ""
    assert not is_running(child.pid, start_mark(child.pid))


def test_a_process_is_running_whatever_its_name_is():
    """The name of a process may hold any bytes, also those that end the name in /proc."""
    rename = r"import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\xff) Z 1'); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", rename]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        mark = start_mark(process.pid)
        assert mark.isdigit() and is_running(process.pid, mark)
        process.stdin.close()


def test_processes_of_one_machine_agree_on_it():
    told = subprocess.run(
        [sys.executable, "-c", "from gt.wire.process_identity import this_host; print(this_host())"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert told.stdout.strip() == this_host()


OUT_OF_FILES = """
import os, resource
from gt.wire.process_identity import is_running, start_mark
parent = os.getppid()
mark = start_mark(parent)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = []
try:
    while True:
        files.append(open(os.devnull))
except OSError:
    print(is_running(parent, mark))
"""


def test_a_process_that_cannot_open_files_takes_no_other_for_dead():
    assert finish(start("-c", OUT_OF_FILES))[:2] == (0, "True\n")
