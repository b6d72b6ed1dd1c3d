"""What must not be left half done, or be begun again in the middle: Ctrl-C, other signals and finalizers come between
any two steps of a program."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` adds to it takes ten times as long
import gc
import os
from _thread import get_ident
from types import FrameType
from typing import Any

from gt.core.errors import SessionError

_SIGINT = int(_signal.SIGINT)
_NO_HANDLERS = (None, _signal.SIG_DFL, _signal.SIG_IGN)
_inside: set[int] = set()  # threads


class _Collection:
    """Of garbage, which runs finalizers of the program's objects. `paused`: by us, and not by the program."""

    paused = False


class Uninterrupted:
    """A block that Ctrl-C does not end in the middle: the interrupt is raised at its end, and a second one at once, for
    who cannot wait. Only the main thread gets interrupts.

    Garbage is collected when no thread is in such a block. A handler of another signal cannot be put off; what it does
    is refused if it needs such a block itself. Between `pause` and `resume` all is as outside of the block.
    """

    __slots__ = ("_count", "_handler", "_paused")

    def __enter__(self) -> Uninterrupted:
        if get_ident() in _inside:
            raise SessionError(
                "this ran in the middle of GT's own work (in a signal handler or a finalizer), where nothing can be "
                "read; let it set a flag, and read when the program goes on"
            )
        self._count = 0
        self._paused = False
        self._handler: Any = _signal.getsignal(_SIGINT)
        if self._handler in _NO_HANDLERS:
            self._handler = None
        else:
            try:
                _signal.signal(_SIGINT, self._note)
            except ValueError:  # not the main thread
                self._handler = None
        _enter()
        return self

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
        _leave()
        if self._handler is not None:
            _signal.signal(_SIGINT, self._handler)
            if self._count == 1:
                _signal.raise_signal(_SIGINT)


def _enter() -> None:
    _inside.add(get_ident())
    if gc.isenabled():
        _Collection.paused = True
        gc.disable()


def _leave() -> None:
    _inside.discard(get_ident())
    _collect_again()


def _collect_again() -> None:
    if not _inside and _Collection.paused:
        _Collection.paused = False
        gc.enable()


def is_uninterrupted() -> bool:
    """Whether this thread is in such a block."""
    return get_ident() in _inside


def _forget_other_threads() -> None:
    """In a forked process, which has none of them."""
    _inside.intersection_update((get_ident(),))
    _collect_again()


os.register_at_fork(after_in_child=_forget_other_threads)
