"""The line of the user's program that issued an op."""

from __future__ import annotations

import builtins
import itertools
import linecache
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import NamedTuple

from gt.core.tracebacks import own_folders


class Site(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str


_UNKNOWN = Site("<unknown>", 0, "")


class Sites:
    """Ids for lines of the user's program, defined on the wire at first use.

    A site is found by walking out of torch's and GT's own frames and is remembered by (code object, instruction
    offset): reading a frame's line number costs more than the rest of the walk.
    """

    def __init__(self, define: Callable[[int, Site], None]) -> None:
        self._define = define
        self._is_own_file: dict[str, bool] = {}
        self._ids: dict[tuple[int, int], int] = {}
        self._code_objects: list[CodeType] = []  # kept alive, because their ids are keys
        self._numbers = itertools.count(1)
        self._sites: dict[int, Site] = {0: _UNKNOWN}

    def current(self, depth: int = 2) -> int:
        """The id of the line that is running; the innermost `depth` frames are known to be GT's. Hot path."""
        frame: FrameType | None = sys._getframe(depth)
        is_own_file = self._is_own_file
        while frame is not None:
            name = frame.f_code.co_filename
            is_own = is_own_file.get(name)
            if is_own is None:
                is_own = is_own_file[name] = name.startswith(own_folders())
            if not is_own:
                key = (id(frame.f_code), frame.f_lasti)
                site_id = self._ids.get(key)
                return site_id if site_id is not None else self._add(key, frame)
            frame = frame.f_back
        return 0

    def _add(self, key: tuple[int, int], frame: FrameType) -> int:
        site = Site(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
        site_id = next(self._numbers)  # no lock: a signal handler may add a site in the middle of this
        self._sites[site_id] = site
        self._code_objects.append(frame.f_code)
        self._define(site_id, site)
        self._ids[key] = site_id
        return site_id

    def text(self, site_id: int) -> str:
        """A site for people: `train.py:12`, or `In[3]:2` in a notebook."""
        file, line, _ = self.lookup(site_id)
        return f"{_cell_of(file) or file}:{line}"

    def code(self, site_id: int) -> str:
        """The source of a site's line; "" if it is not known."""
        file, line, _ = self.lookup(site_id)
        return linecache.getline(file, line).strip()

    def lookup(self, site_id: int) -> Site:
        return self._sites.get(site_id, _UNKNOWN)


def _cell_of(file: str) -> str:
    """The cell of a notebook or of IPython that has this file name, as IPython's own tracebacks name it; else ""."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    found = shell.compile.format_code_name(file) if shell is not None else None
    return found[1] if found is not None else ""
