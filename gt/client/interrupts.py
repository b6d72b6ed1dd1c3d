"""What must not be left half done, or be begun again in the middle: Ctrl-C, other signals and finalizers come between
any two steps of a program."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` adds to it takes ten times as long
import gc
import os
import threading
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any

from gt.core.errors import SessionError

_SIGINT = int(_signal.SIGINT)
_NO_HANDLERS = (None, _signal.SIG_DFL, _signal.SIG_IGN)
_inside: set[int] = set()  # threads
_after: dict[int, Callable[[], None]] = {}  # by thread


class _Process:
    """`paused`: the collection of garbage, by us and not by the program."""

    main = threading.main_thread().ident
    paused = False


class CriticalSection:
    """A block that Ctrl-C does not end in the middle: the interrupt is raised at its end, and a second one at once, for
    who cannot wait. Only the main thread gets interrupts.

    No garbage is collected while the main thread is in such a block, since that runs finalizers of the program's
    objects. In other threads it goes on: it is the program's to turn on and off. A handler of another signal cannot be
    put off either. What they do is refused if it needs such a block itself. Between `pause` and `resume` all is as
    outside of the block.
    """

    __slots__ = ("_count", "_handler", "_paused")

    def __enter__(self) -> CriticalSection:
        require_outside()
        self._count = 0
        self._paused = False
        self._handler: Any = _signal.getsignal(_SIGINT)
        if self._handler in _NO_HANDLERS:
            self._handler = None
        try:
            if self._handler is not None:
                self._take_over()
            _enter()
        except BaseException:  # of a signal handler
            self.__exit__()
            raise
        return self

    def _take_over(self) -> None:
        try:
            _signal.signal(_SIGINT, self._note)
        except ValueError:  # not the main thread
            self._handler = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._paused:
            self._handler(number, frame)
            return
        self._count += 1
        if self._count > 1:
            self._handler(number, frame)

    def pause(self) -> None:
        self._paused = True
        _leave()

    def resume(self) -> None:
        _enter()
        self._paused = False

    def __exit__(self, *_: object) -> None:
        try:
            _leave()
        finally:
            if self._handler is not None:
                _signal.signal(_SIGINT, self._handler)
        if self._handler is not None and self._count == 1:
            _signal.raise_signal(_SIGINT)
        if _after and not self._paused:
            _after.pop(get_ident(), _nothing)()


def is_uninterrupted() -> bool:
    """Whether this thread is in such a block."""
    return get_ident() in _inside


def require_outside() -> None:
    if get_ident() in _inside:
        raise SessionError(
            "this ran in the middle of GT's own work (in a signal handler or a finalizer), where nothing can be read; "
            "let it set a flag, and read when the program goes on"
        )


def do_after_block(action: Callable[[], None]) -> None:
    """At the end of the block that this thread is in."""
    _after[get_ident()] = action


def _nothing() -> None:
    pass


def _enter() -> None:
    ident = get_ident()
    _inside.add(ident)
    if ident == _Process.main and gc.isenabled():
        _Process.paused = True
        gc.disable()


def _leave() -> None:
    ident = get_ident()
    if ident == _Process.main and _Process.paused:
        _Process.paused = False
        gc.enable()
    _inside.discard(ident)


def _forget_other_threads() -> None:
    """In a forked process, which has none of them."""
    ident = get_ident()
    if ident != _Process.main and _Process.paused:
        _Process.paused = False
        gc.enable()
    _Process.main = ident
    _inside.intersection_update((ident,))


os.register_at_fork(after_in_child=_forget_other_threads)
