"""Critical sections: blocks that Ctrl-C does not leave half done and that signal handlers do not enter twice."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # hot path: `signal` would add 20 us to every read
import os
import threading
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

from gt.core.errors import SessionError

_SIGINT = int(_signal.SIGINT)
_NO_HANDLERS = (None, _signal.SIG_DFL, _signal.SIG_IGN)
_threads_inside: set[int] = set()
_deferred: dict[int, Callable[[], None]] = {}  # callbacks of threads in critical sections, by thread


class CriticalSection:
    """Defers Ctrl-C to the end of a block; a second Ctrl-C is raised at once. Only the main thread receives interrupts.

    Handlers of other signals, and finalizers, may run in the middle of a block. Reads, flushes and uploads in them need
    a critical section themselves, and are refused.
    """

    __slots__ = ("_handler", "_interrupts")

    def __enter__(self) -> CriticalSection:
        require_outside()
        self._interrupts = 0
        self._handler: Any = None
        try:
            if threading.current_thread() is threading.main_thread():
                self._take_over()
            _threads_inside.add(get_ident())
        except BaseException:  # raised by a signal handler
            self.__exit__()
            raise
        return self

    def _take_over(self) -> None:
        handler = _signal.getsignal(_SIGINT)
        if handler not in _NO_HANDLERS:
            self._handler = handler
            _signal.signal(_SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._handler(number, frame)

    def __exit__(self, *_: object) -> None:
        try:
            _threads_inside.discard(get_ident())
        finally:
            if self._handler is not None:
                _signal.signal(_SIGINT, self._handler)
        if self._handler is not None and self._interrupts == 1:
            _signal.raise_signal(_SIGINT)
        if _deferred and get_ident() in _deferred:
            _deferred.pop(get_ident())()


def is_inside() -> bool:
    """Whether this thread is in a critical section."""
    return get_ident() in _threads_inside


def require_outside() -> None:
    if get_ident() in _threads_inside:
        raise SessionError(
            "this ran in the middle of GT's own work (in a signal handler or a finalizer), where nothing can be read; "
            "let it set a flag, and read when the program goes on"
        )


def defer(action: Callable[[], None]) -> None:
    """Run an action at the end of the critical section that this thread is in."""
    _deferred[get_ident()] = action


def _forget_other_threads() -> None:
    """After a fork: forget the other threads of the parent."""
    _threads_inside.intersection_update((get_ident(),))


os.register_at_fork(after_in_child=_forget_other_threads)
