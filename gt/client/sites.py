"""Which line of the user's program issued an op."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

from gt.client.tracebacks import OWN_FOLDERS


class Sites:
    """Codes for places in the user's program, defined on the wire at first use.

    A place is found by walking out of torch's and GT's own frames and is remembered by (code object, instruction
    offset): reading a frame's line number costs more than the rest of the walk.
    """

    def __init__(self, define: Callable[[int, str, int, str], None]) -> None:
        self._define = define
        self._is_ours: dict[str, bool] = {}
        self._codes: dict[tuple[int, int], int] = {}
        self._keep: list[CodeType] = []  # ids of code objects are keys, so the objects must live
        self._adding = threading.Lock()
        self._places: list[tuple[str, int, str]] = [("<unknown>", 0, "")]

    def here(self, depth: int = 2) -> int:
        """The line that called; `depth` frames are known to be ours."""
        frame: FrameType | None = sys._getframe(depth)
        is_ours = self._is_ours
        while frame is not None:
            name = frame.f_code.co_filename
            ours = is_ours.get(name)
            if ours is None:
                ours = is_ours[name] = name.startswith(OWN_FOLDERS)
            if not ours:
                key = (id(frame.f_code), frame.f_lasti)
                code = self._codes.get(key)
                return code if code is not None else self._add(key, frame)
            frame = frame.f_back
        return 0

    def _add(self, key: tuple[int, int], frame: FrameType) -> int:
        place = (frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
        with self._adding:
            code = len(self._places)
            self._places.append(place)
            self._keep.append(frame.f_code)
        self._define(code, *place)
        self._codes[key] = code
        return code

    def place(self, code: int) -> tuple[str, int, str]:
        return self._places[code] if code < len(self._places) else self._places[0]
