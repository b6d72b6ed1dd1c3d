"""Progress of long waits, in a real terminal: shown below the cursor, erased at the end, and nothing elsewhere."""

import os
import pty
import select
import signal
import sys
import termios
import time
from subprocess import PIPE, Popen

import pyte
import pytest

from gt.monitor.progress import open_display

READS = """
import sys
import gt
gt.init(workers=2)
x = gt.ones(6, 4, mesh=gt.mesh(2, ("x",)), placements="x, -")
assert x.sum().item() == 24
print("pids", *[worker.pid for worker in x._ref.session.workers], flush=True)
sys.stdin.readline()
print("loss:", end=" ", flush=True)
print(x.sum().item(), flush=True)
sys.stdin.readline()
"""


class Terminal:
    """A terminal that a program runs in, and the screen that a person sees."""

    def __init__(self, code, rows=12, columns=100, **environ):
        self.master, screen = pty.openpty()
        termios.tcsetwinsize(screen, (rows, columns))
        attributes = termios.tcgetattr(screen)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(screen, termios.TCSANOW, attributes)
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        environ = {**os.environ, "TERM": "xterm-256color", **environ}
        self.process = Popen([sys.executable, "-c", code], stdin=screen, stdout=screen, stderr=screen, env=environ)
        os.close(screen)

    def lines(self):
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def read_until(self, shows, seconds=60):
        """The lines of the screen as soon as `shows` is true of them."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if shows(self.lines()):
                return self.lines()
            if select.select([self.master], [], [], 0.1)[0]:
                self._stream.feed(os.read(self.master, 1 << 16))
        raise AssertionError("\n".join(self.lines()))

    def type(self, text=""):
        os.write(self.master, f"{text}\n".encode())

    def close(self):
        self.type()
        self.type()
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.master)


@pytest.fixture
def terminal():
    opened = []

    def open_terminal(code, **options):
        opened.append(Terminal(code, **options))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def pids(lines):
    found = [line.split()[1:] for line in lines if line.startswith("pids") and len(line.split()) == 3]
    return list(map(int, found[0])) if found else []


def test_a_read_that_waits_for_a_stopped_worker_says_so_below_the_users_line(terminal):
    window = terminal(READS)
    _, second = pids(window.read_until(pids))
    os.kill(second, signal.SIGSTOP)
    try:
        window.type()
        shown = window.read_until(lambda lines: any("worker 1" in line for line in lines))
        assert shown[-2] == "loss:"  # the user's line is as it was
        assert shown[-1].startswith("gt: waiting for ") and "which was stopped at aten.sum.default" in shown[-1]
        first = shown[-1]
        later = window.read_until(lambda lines: lines[-1] != first)
        assert len(later) == len(shown) and later[-2] == "loss:"  # it replaces itself
    finally:
        os.kill(second, signal.SIGCONT)
    shown = window.read_until(lambda lines: "loss: 24.0" in lines)
    assert shown[-1] == "loss: 24.0"


@pytest.mark.parametrize("environ", [{"GT_PROGRESS": "0"}, {"TERM": "dumb"}], ids=str)
def test_where_no_progress_is_wanted_there_is_none(environ, terminal):
    code = "import gt.monitor.progress as p, gt.core.settings as s; print(p.open_display(s.read_settings().progress))"
    assert terminal(code, **environ).read_until(bool) == ["None"]


DRAWS = """
import sys
from gt.monitor.progress import open_display
display = open_display(True)
for number in range(5):
    print("line", number)
print("loss: ", end="", flush=True)
for number in range(3):
    display.show(f"gt: waits {number} \x1b[2J " + "x" * 200)
sys.stdin.readline()
display.clear()
print("done", end="", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("environ", [{"COLUMNS": "80"}, {"NO_COLOR": "1"}], ids=str)
def test_at_the_end_of_the_screen_the_users_lines_move_up(terminal, environ):
    window = terminal(DRAWS, rows=4, columns=40, **environ)
    shown = window.read_until(lambda lines: lines[-1:] and lines[-1].startswith("gt: waits 2"))
    assert shown == ["line 3", "line 4", "loss:", "gt: waits 2 ?[2J " + "x" * 21 + "…"]
    window.type()
    assert window.read_until(lambda lines: "loss: done" in lines) == ["line 3", "line 4", "loss: done"]


def test_colours_are_left_out_if_asked(terminal):
    code = "import gt.monitor.progress as p; print(repr(p.open_display(True)._render('gt: waits')))"
    assert terminal(code, NO_COLOR="1").read_until(bool) == ["'gt: waits'"]
    assert terminal(code).read_until(bool) == ["'\\x1b[2mgt: waits\\x1b[0m'"]


def test_nothing_is_drawn_into_files_and_pipes(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert open_display(is_wanted=True) is None


@pytest.mark.slow  # the first notice comes after 10 s
def test_a_program_without_a_terminal_says_what_it_said_before():
    command, environment = [sys.executable, "-c", READS], {**os.environ, "GT_HEARTBEAT_TIMEOUT": "60"}
    with Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=environment) as program:
        _, second = map(int, program.stdout.readline().split()[1:])
        os.kill(second, signal.SIGSTOP)
        try:
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stderr.readline().startswith(
                "gt: waiting for 10 s; for worker 1, which was stopped at aten.sum"
            )
        finally:
            os.kill(second, signal.SIGCONT)
        out, err = program.communicate("\n", timeout=60)
    assert (program.returncode, out, err) == (0, "loss: 24.0\n", "")
