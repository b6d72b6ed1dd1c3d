"""The text of lines of the user's program."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Iterable

from gt.web_dashboard.records import CodeOfLine

LONGEST = 200  # characters of a line


@functools.lru_cache(maxsize=4096)
def code_of(line: str) -> str:
    """The text of `file:number`; empty if the file is not Python code, or not here."""
    file, _, number = line.rpartition(":")
    if not number.isdecimal() or not (file.endswith(".py") or file in linecache.cache):
        return ""
    return linecache.getline(file, int(number)).strip()[:LONGEST]


def code_of_lines(lines: Iterable[str]) -> tuple[CodeOfLine, ...]:
    return tuple([CodeOfLine(line, code_of(line)) for line in dict.fromkeys(lines) if line])
