"""What Linux does when the parent of a process ends. Other systems do neither."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # see prctl(2)


def signal_at_parent_end(number: signal.Signals) -> None:
    """Ask for a signal to this process whenever its parent ends, or the process that becomes its parent then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of processes that its children, or theirs, have started and leave behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
