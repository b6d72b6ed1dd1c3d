"""Waits of one process for a word of memory that another process changes, by the futex of Linux."""

from __future__ import annotations

import ctypes
import platform
import sys

_WAIT, _WAKE = 0, 1  # on memory shared by processes, so without FUTEX_PRIVATE_FLAG
_SYSTEM_CALLS = {"x86_64": 202}
_ALL = 0x7FFFFFFF


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_number = _SYSTEM_CALLS.get(platform.machine(), 0) if sys.platform == "linux" else 0
_system_call = ctypes.CDLL(None, use_errno=True).syscall if _number else None


def is_available() -> bool:
    """Whether processes of this machine may signal each other by plain writes to shared memory. On x86 no write is seen
    before an earlier one of the same process; other processors need barriers, which Python cannot give."""
    return _system_call is not None


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until `wake` is called for an address, at most so long; not at all if the 32-bit word there is no longer
    `expected`. The kernel compares and begins to wait in one step, so that no call of `wake` is missed."""
    assert _system_call is not None
    limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
    _system_call(
        _number, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(expected), ctypes.byref(limit), None, ctypes.c_int(0)
    )


def wake(address: int) -> None:
    """Wake all processes that wait for an address."""
    assert _system_call is not None
    _system_call(_number, ctypes.c_void_p(address), _WAKE, ctypes.c_int(_ALL), None, None, ctypes.c_int(0))
