"""GT's log on stderr: warnings always, more if a setting asks for it, and never blocking.

A peer that sends malformed messages decides how many warnings a server logs. So warnings that repeat are counted and
not all written, and lines are dropped if nobody reads stderr.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import select
import stat
from typing import TextIO

from gt.core.settings import Settings
from gt.core.tables import CALLS, CODE, COMMANDS, PLANS

VISIBLE_LOGGERS = (
    "gt.client",
    "gt.launch",
    "gt.dispatcher",
    "gt.worker",
    "gt.sharding",
    "gt.signals",
    "gt.wire",
    "gt.compile",
    "gt.debug",
    "gt.dashboard",
    "gt.monitor",
)
"""Loggers whose warnings are written without GT_VERBOSE."""

MAX_REPEATS = 20  # warnings of one kind that are written
REPEAT_SECONDS = 10.0  # period for which MAX_REPEATS counts
MAX_KINDS = 1024  # kinds of warnings that are counted apart
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # without tabs and ends of lines


class _RepeatedWarning:
    """Warnings with the same template and other values: the time of the first, their number, and the latest text."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.count = 0
        self.last = ""


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes lines without blocking, and of warnings that repeat too often only their number."""

    def __init__(self) -> None:
        super().__init__()
        self._warnings: dict[tuple[str, str], _RepeatedWarning] = {}
        self._dropped_lines = 0
        self._nonblocking: tuple[tuple[int, int], int] | None = None  # (device, inode) of stderr, and a descriptor

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._report_repeats(record.created - REPEAT_SECONDS)
            text = self.format(_printable(record))
            if record.levelno < logging.WARNING or self._is_shown(record, text):
                self._write(text)
        except Exception:
            self.handleError(record)

    def _is_shown(self, record: logging.LogRecord, text: str) -> bool:
        """Whether a warning is one of the first with its template."""
        template = str(record.msg)
        key = (record.name, text if template == "%s" and len(self._warnings) < MAX_KINDS else template)
        warning = self._warnings.setdefault(key, _RepeatedWarning(record.created))
        warning.count += 1
        warning.last = text
        return warning.count <= MAX_REPEATS

    def _report_repeats(self, until: float) -> None:
        """Write the numbers of warnings that were left out, of those that began before a time."""
        for key, warning in [(key, warning) for key, warning in self._warnings.items() if warning.since <= until]:
            del self._warnings[key]
            if warning.count > MAX_REPEATS:
                self._write(f"{warning.last} (and {warning.count - MAX_REPEATS - 1:,} more like this)")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._report_repeats(float("inf"))
        if self._nonblocking is not None:
            os.close(self._nonblocking[1])
            self._nonblocking = None
        super().close()

    def _write(self, text: str) -> None:
        if self._dropped_lines:
            text = f"gt: {self._dropped_lines:,} lines were not written, as nobody read them\n{text}"
        if self._try_write(f"{text}\n"):
            self._dropped_lines = 0
        else:
            self._dropped_lines += 1

    def _try_write(self, text: str) -> bool:
        """Write some lines, unless that would block; returns whether they were written."""
        try:
            descriptor = self.stream.fileno()
            mode = os.fstat(descriptor).st_mode
        except (AttributeError, OSError, ValueError):  # a stream that is no file
            descriptor, mode = -1, 0
        if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)):
            self.stream.write(text)
            self.flush()
            return True
        return self._write_available(self._open_nonblocking(descriptor), text.encode(errors="backslashreplace"))

    def _open_nonblocking(self, descriptor: int) -> int:
        """A non-blocking descriptor of the same pipe or terminal, since other processes share the mode of the given
        one. The given descriptor if the file cannot be opened again."""
        status = os.fstat(descriptor)
        file = (status.st_dev, status.st_ino)
        if self._nonblocking is not None and self._nonblocking[0] == file:
            return self._nonblocking[1]
        if self._nonblocking is not None:
            os.close(self._nonblocking[1])
            self._nonblocking = None
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # a socket, or there is no /proc
            return descriptor
        self._nonblocking = (file, own)
        return own

    def _write_available(self, descriptor: int, data: bytes) -> bool:
        """Write as many bytes as fit now; returns whether that was any."""
        poller = select.poll()
        poller.register(descriptor, select.POLLOUT)
        written = 0
        while written < len(data):
            if not poller.poll(0):
                break
            try:
                written += os.write(descriptor, data[written : written + select.PIPE_BUF])
            except BlockingIOError:
                break
            except OSError:  # the reader has closed its end
                return True
        return written > 0


def _printable(record: logging.LogRecord) -> logging.LogRecord:
    """A record whose values cannot move the cursor, nor pass for a separate line: peers choose some of them."""
    if record.levelno < logging.WARNING or not isinstance(record.args, tuple):
        return record
    shown = copy.copy(record)
    shown.args = tuple([_escape(value) if isinstance(value, str) else value for value in record.args])
    return shown


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text).replace("\n", "\n  ")


def configure_logging(settings: Settings) -> None:
    """GT_VERBOSE shows INFO of all loggers on stderr, GT_DEBUG_* shows DEBUG of one role, and its table. Otherwise
    warnings and errors of VISIBLE_LOGGERS are shown: the loss of a worker, a bug in GT, an op that cannot run on
    shards, a signal that names missing workers, too little shared memory."""
    levels = {
        "gt": logging.INFO if settings.verbose else None,
        "gt.client": logging.DEBUG if settings.debug_client else None,
        "gt.dispatcher": logging.DEBUG if settings.debug_dispatcher else None,
        "gt.worker": logging.DEBUG if settings.debug_worker else None,
        "gt.compile": logging.INFO if settings.debug_compile else None,
    }
    root = logging.getLogger("gt")
    if not any(isinstance(handler, logging.NullHandler) for handler in root.handlers):
        root.addHandler(logging.NullHandler())  # without it Python prints the warnings of unconfigured loggers
    for logger in map(logging.getLogger, VISIBLE_LOGGERS):
        if not any(levels.values()) and not logger.handlers:
            logger.addHandler(_handler("gt: %(message)s"))
    if any(levels.values()) and len(root.handlers) == 1:
        root.addHandler(_handler("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for name, level in levels.items():
        if level is not None:
            logging.getLogger(name).setLevel(level)
    tables = {
        PLANS: settings.debug_dispatcher,
        CALLS: settings.debug_client,
        COMMANDS: settings.debug_worker,
        CODE: settings.debug_compile,
    }
    for table in [logging.getLogger(name) for name, is_shown in tables.items() if is_shown]:
        table.setLevel(logging.DEBUG)
        table.propagate = False  # its rows have no room for the time and the name of the logger
        if not table.handlers:
            table.addHandler(_handler("%(message)s"))


def _handler(template: str) -> StderrHandler:
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter(template))
    return handler
