"""`python -m gt.scripts.top`, in a real terminal and for machines."""

import json
import os
import pty
import re
import select
import sys
import termios
import time
from subprocess import PIPE, Popen

import pytest

from tests.subprocesses import ROOT, finish, running, start

PROGRAM = """
import time
from pathlib import Path
import gt
gt.init(workers=2, mode="virtual")
x = gt.ones(64, 64)
print("ready", flush=True)
end = time.time() + 60
while not Path({stop!r}).exists() and time.time() < end:
    (x @ x).sum().item()
"""


@pytest.fixture
def program(tmp_path):
    stop = tmp_path / "stop"
    program = start("-c", PROGRAM.format(stop=str(stop)))
    with running(program):
        assert program.stdout.readline() == "ready\n"
        yield program
        stop.touch()
        assert finish(program, 60)[0] == 0


def top(*options):
    return finish(start("-m", "gt.scripts.top", "--interval", "0.2", *options), 60)


def test_one_look_for_people_and_for_machines(program):
    code, out, err = top("--once", "--pid", str(program.pid))
    assert code == 0, err
    assert "workers" in out and "sessions" in out and "ops: " in out
    code, out, err = top("--once", "--json", "--pid", str(program.pid))
    assert code == 0, err
    (line,) = out.splitlines()
    look = json.loads(line)
    assert look["pid"] == program.pid and [worker["worker"] for worker in look["workers"]] == [0, 1]
    assert sum(worker["ops_per_second"] for worker in look["workers"]) > 1
    assert set(look["op_mix"]) <= {"aten.mm.default", "aten.sum.default"}


def test_without_a_program_it_says_so():
    code, out, err = top("--once", "--pid", "1")
    assert (code, out) == (1, "") and "process 1 does not use GT" in err


@pytest.mark.parametrize("interval", ["nan", "0", "x", "1e300"])
def test_an_interval_that_is_no_positive_number_is_refused(interval):
    code, out, err = top("--once", "--interval", interval)
    assert (code, out) == (2, "") and "number" in err and "Traceback" not in err


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["people", "machines"])
def test_output_that_cannot_be_written_is_a_message(program, options):
    command = f"{sys.executable} -m gt.scripts.top --once --pid {program.pid} {' '.join(options)}"
    with Popen(["sh", "-c", f"{command} > /dev/full"], stderr=PIPE, text=True, cwd=ROOT) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.startswith("gt.scripts.top: the output cannot be written: "), err
    assert len(err.splitlines()) == 1


def test_a_reader_that_has_seen_enough_is_no_failure(program):
    command = f"{sys.executable} -m gt.scripts.top --json --interval 0.1 --pid {program.pid}; echo $? >&2"
    with Popen(["sh", "-c", f"({command}) | head -1"], stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT) as process:
        out, err = process.communicate(timeout=60)
    assert len(out.splitlines()) == 1 and json.loads(out)["pid"] == program.pid and err == "0\n"


def read_until(terminal, text, seconds=30):
    """What a terminal shows until a text appears, without colours."""
    shown, deadline = "", time.monotonic() + seconds
    while text not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(terminal, 1 << 16).decode(errors="replace"))
    assert text in shown, shown[-2000:]
    return shown


def test_keys_sort_pause_and_quit_in_a_terminal(program):
    terminal, screen = pty.openpty()
    before = termios.tcgetattr(screen)
    termios.tcsetwinsize(screen, (40, 160))
    command = [sys.executable, "-m", "gt.scripts.top", "--interval", "0.1", "--pid", str(program.pid)]
    process = Popen(command, stdin=screen, stdout=screen, stderr=screen, env={**os.environ, "TERM": "xterm"})
    try:
        read_until(terminal, "sorted by worker")
        os.write(terminal, b"m")
        read_until(terminal, "sorted by memory")
        os.write(terminal, b"p")
        read_until(terminal, "paused")
        os.write(terminal, b"q")
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 1 << 16)
        assert process.poll() == 0
        assert termios.tcgetattr(screen) == before, "the terminal is as it was"
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(screen)
