"""What GT tells on stderr: warnings always, more where a setting asks for it, and never at the price of waiting.

Whoever sends a server malformed messages decides how much the server has to tell. So messages that repeat are counted
and not all written, and a reader of stderr who does not read costs lines, not the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import stat
from typing import TextIO

from gt.core.settings import Settings

SHOWN = ("gt.dispatcher", "gt.worker", "gt.sharding", "gt.signals")
"""Loggers whose warnings reach stderr without GT_VERBOSE. A client raises its news as errors instead."""

REPEATS = 20  # warnings of one kind that are written
SECONDS = 10.0  # in this time


class _Kind:
    """Warnings that differ in their values only. `since` is when the first of them came, `last` the latest text."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.count = 0
        self.last = ""


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes lines without waiting for a reader. Of warnings that come too often it tells how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._unwritten = 0
        self._own: tuple[tuple[int, int], int] | None = None  # a file, and a descriptor of it that never waits

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell_of_repeats(record.created - SECONDS)
            text = self.format(record)
            if record.levelno < logging.WARNING or self._is_due(record, text):
                self._write(text)
        except Exception:
            self.handleError(record)

    def _is_due(self, record: logging.LogRecord, text: str) -> bool:
        """Whether a warning is one of the first of its kind."""
        form = str(record.msg)
        kind = self._kinds.setdefault((record.name, text if form == "%s" else form), _Kind(record.created))
        kind.count += 1
        kind.last = text
        return kind.count <= REPEATS

    def _tell_of_repeats(self, until: float) -> None:
        """What was left out of the kinds that began before a time."""
        for key, kind in [(key, kind) for key, kind in self._kinds.items() if kind.since <= until]:
            del self._kinds[key]
            if kind.count > REPEATS:
                self._write(f"{kind.last} (and {kind.count - REPEATS - 1:,} more like this)")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._tell_of_repeats(float("inf"))
        if self._own is not None:
            os.close(self._own[1])
            self._own = None
        super().close()

    def _write(self, text: str) -> None:
        if self._unwritten:
            text = f"gt: {self._unwritten:,} lines were not written, as nobody read them\n{text}"
        if self._try(f"{text}\n"):
            self._unwritten = 0
        else:
            self._unwritten += 1

    def _try(self, text: str) -> bool:
        """Write some lines, unless that would have to wait."""
        try:
            descriptor = self.stream.fileno()
            mode = os.fstat(descriptor).st_mode
        except (AttributeError, OSError, ValueError):  # a stream that is no file
            descriptor, mode = -1, 0
        if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)):
            self.stream.write(text)
            self.flush()
            return True
        return self._try_now(self._never_waiting(descriptor), text.encode(errors="backslashreplace"))

    def _never_waiting(self, descriptor: int) -> int:
        """The same pipe or terminal, opened once more: the mode of the descriptor that others have too must stay. The
        descriptor itself where that is not possible."""
        status = os.fstat(descriptor)
        file = (status.st_dev, status.st_ino)
        if self._own is not None and self._own[0] == file:
            return self._own[1]
        if self._own is not None:
            os.close(self._own[1])
            self._own = None
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # a socket, or there is no /proc
            return descriptor
        self._own = (file, own)
        return own

    def _try_now(self, descriptor: int, data: bytes) -> bool:
        """The part of a line that has found room counts as the line."""
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
            except OSError:  # the reader is gone
                return True
        return written > 0


def configure_logging(settings: Settings) -> None:
    """GT_VERBOSE shows INFO of everything on stderr, GT_DEBUG_* shows DEBUG of one role. Otherwise warnings and errors
    of the loggers in SHOWN are shown: the loss of a worker, a mistake of GT's own, an op that cannot run on shards, a
    signal that asks for what there is not."""
    levels = {
        "gt": logging.INFO if settings.verbose else None,
        "gt.client": logging.DEBUG if settings.debug_client else None,
        "gt.dispatcher": logging.DEBUG if settings.debug_dispatcher else None,
        "gt.worker": logging.DEBUG if settings.debug_worker else None,
    }
    root = logging.getLogger("gt")
    if not any(isinstance(handler, logging.NullHandler) for handler in root.handlers):
        root.addHandler(logging.NullHandler())  # without it Python prints warnings of libraries nobody configured
    for logger in map(logging.getLogger, SHOWN):
        if not any(levels.values()) and not logger.handlers:
            logger.addHandler(_handler("gt: %(message)s"))
    if any(levels.values()) and len(root.handlers) == 1:
        root.addHandler(_handler("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for name, level in levels.items():
        if level is not None:
            logging.getLogger(name).setLevel(level)


def _handler(form: str) -> StderrHandler:
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter(form))
    return handler
