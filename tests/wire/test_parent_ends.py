"""Linux sends a process a signal when its parent ends, and gives orphans to the process that adopts them."""

import sys

import pytest

from tests.subprocesses import finish, start_interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do neither")

# Two generations: the process in the middle ends when its child is ready, which prints what happens to it.
PROGRAM = """
import os, signal
from gt.wire.lifeline import adopt_orphans, signal_at_parent_end
first = os.getpid()
if {adopts}:
    adopt_orphans()
ready, writing = os.pipe()
if not (middle := os.fork()):
    if not os.fork():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal_at_parent_end(signal.SIGUSR1)
        os.write(writing, b"x")
        found = signal.sigtimedwait([signal.SIGUSR1], 30)
        print("signalled" if found else "nothing came", os.getppid() == first, flush=True)
        os._exit(0)
    os.read(ready, 1)
    os._exit(0)
os.waitpid(middle, 0)
if {adopts}:
    os.wait()
"""


@pytest.mark.parametrize("adopts", [False, True])
def test_a_process_is_signalled_when_its_parent_ends_and_adopted_if_somebody_does(adopts: bool) -> None:
    code, out, err = finish(start_interpreter("-c", PROGRAM.format(adopts=adopts)), 60)
    assert (code, out) == (0, f"signalled {adopts}\n"), err
