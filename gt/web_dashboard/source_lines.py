"""The text of lines of the user's program."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import stat
from collections.abc import Iterable

from gt.web_dashboard.records import CodeOfLine

LONGEST = 200  # characters of a line
MAX_FILES = 1024  # that are kept
MAX_FILE = 1 << 20  # bytes of a file that is read: clients of a server name the files


@functools.lru_cache(maxsize=4096)
def code_of(line: str) -> str:
    """The text of `file:number`; empty if the file is not Python code, or not here."""
    file, _, number = line.rpartition(":")
    if not number.isdecimal():
        return ""
    if file not in linecache.cache and not _can_be_read(file):
        return ""
    return linecache.getline(file, int(number)).strip()[:LONGEST]


def _can_be_read(file: str) -> bool:
    """Whether it is a file of Python code: no pipe, which would be waited for, no device and nothing without an end."""
    if not file.endswith(".py") or not os.path.isabs(file) or len(linecache.cache) >= MAX_FILES:
        return False
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(file)
        return stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE
    return False


def code_of_lines(lines: Iterable[str]) -> tuple[CodeOfLine, ...]:
    return tuple([CodeOfLine(line, code_of(line)) for line in dict.fromkeys(lines) if line])
