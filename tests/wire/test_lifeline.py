"""A process ends with its parent, even while it is busy or blocked."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import threading, time
from gt.wire import lifeline

lifeline.LIMIT_SECONDS = 1

def clear_up():
    print("cleared up", flush=True)
    {after}

lifeline.end_with_parent(clear_up)
print("ready", flush=True)
{at}
"""
BUSY, BLOCKED = "while True: pass", "threading.Event().wait()"


def end(at, after="pass"):
    """Start such a program and close its standard input; gives exit code, output and seconds until its end."""
    command = [sys.executable, "-c", PROGRAM.format(at=at, after=after)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            process.stdin.close()
            begun = time.monotonic()
            code = process.wait(timeout=30)
            return code, process.stdout.read(), time.monotonic() - begun
        finally:
            process.kill()


@pytest.mark.parametrize("at", [BUSY, BLOCKED], ids=["busy", "blocked"])
def test_a_busy_or_blocked_process_clears_up_and_ends(at):
    code, out, _ = end(at)
    assert (code, out) == (0, b"cleared up\n")


def test_a_process_that_cannot_clear_up_ends_all_the_same():
    assert end(BLOCKED, after="1 / 0")[0] == 0


@pytest.mark.parametrize("after", [BLOCKED, BUSY], ids=["blocked", "busy"])
def test_clearing_up_has_a_limit(after):
    code, _, seconds = end(BLOCKED, after)
    assert code == -signal.SIGALRM and seconds < 10
