"""Ctrl-C waits until what must not be left half done is done, so that a program that catches it can go on."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` adds to it takes ten times as long
from types import FrameType
from typing import Any

_SIGINT = int(_signal.SIGINT)
_NO_HANDLERS = (None, _signal.SIG_DFL, _signal.SIG_IGN)


class Uninterrupted:
    """A block that Ctrl-C does not end in the middle: the interrupt is raised at its end, and a second one at once, for
    who cannot wait. Only the main thread gets interrupts, so in any other this does nothing."""

    __slots__ = ("_count", "_handler")

    def __enter__(self) -> None:
        self._count = 0
        self._handler: Any = _signal.getsignal(_SIGINT)
        if self._handler in _NO_HANDLERS:
            self._handler = None
            return
        try:
            _signal.signal(_SIGINT, self._note)
        except ValueError:  # not the main thread
            self._handler = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            self._handler(number, frame)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            _signal.signal(_SIGINT, self._handler)
            if self._count == 1:
                _signal.raise_signal(_SIGINT)
