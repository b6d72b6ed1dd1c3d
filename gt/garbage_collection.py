"""Pauses Python's garbage collector while modules are imported."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_NEVER = 1 << 30  # new objects
_lock = threading.RLock()
_pauses = 0
_threshold = 0  # the program's own threshold, during a pause


@contextmanager
def paused_collection() -> Generator[None]:
    """Collect no garbage in a block, in which modules are imported: they make little garbage, and looking for it takes
    a third of the time, most of it among the objects of torch. Blocks of several threads may overlap."""
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _pauses, _threshold
    with _lock:
        if not _pauses:
            _threshold, *others = gc.get_threshold()
            gc.set_threshold(_NEVER, *others)
        _pauses += 1


def _end() -> None:
    global _pauses
    with _lock:
        _pauses -= 1
        often, *others = gc.get_threshold()
        if not _pauses and often == _NEVER:  # the program has not set another one meanwhile
            gc.set_threshold(_threshold, *others)
