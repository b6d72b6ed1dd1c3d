"""Writes what was captured to files: a trace in Chrome's format, and a log in the columns of the instruction log."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from gt.core.errors import SettingsError
from gt.core.output_files import make_parents, open_binary, open_text
from gt.monitor.chrome_trace import chrome_trace
from gt.monitor.log_rows import FORMATS
from gt.monitor.records import Record
from gt.monitor.trace_log import trace_rows

LOG_SUFFIX = ".log"


def write_trace(path: Path, records: Iterable[Record], dropped: int) -> None:
    """Write a trace that Perfetto opens, or a log if the name of the file ends with `.log`. Raises SettingsError if the
    file cannot be written."""
    if path.suffix == LOG_SUFFIX:
        data = print_log(records).encode()
    else:
        data = msgspec.json.encode(chrome_trace(records, dropped))
    try:
        make_parents(path)
        _write(path, data)
    except OSError as error:
        raise SettingsError(f"the trace cannot be written to {path}: {error}") from None


def require_writable(path: Path) -> None:
    """Find out whether a trace can be written to a file, before anything is captured for it. Raises SettingsError."""
    try:
        make_parents(path)
        if os.path.lexists(path):
            open_text(path, "a").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise SettingsError(f"the trace cannot be written to {path}: {error}") from None


def _write(path: Path, data: bytes) -> None:
    """Write a file, or none: on a full disk, and after Ctrl-C, no part of it stays, which no tool could read."""
    try:
        with open_binary(path) as file:
            file.write(data)
    except BaseException:
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():  # a device stays
                path.unlink()
        raise


def print_log(records: Iterable[Record]) -> str:
    """Records in the columns of the instruction log."""
    text = FORMATS["text"]
    return text.header + "".join(map(text.line, trace_rows(records)))


def describe_gaps(dropped: int, missing: Sequence[int]) -> str:
    """What a trace does not have; empty if it is complete."""
    gaps = []
    if dropped:
        gaps.append(f"{dropped} records were over the limit and are not in it")
    if missing:
        workers = ", ".join(map(str, missing))
        gaps.append(f"workers {workers} were busy, or stopped, and did not send their commands in time")
    return "; ".join(gaps)
