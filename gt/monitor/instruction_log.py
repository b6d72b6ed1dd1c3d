"""The instruction log: one line for each message that the dispatcher receives or sends, as columns or as JSON."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from pathlib import Path
from typing import TextIO

from gt.core.errors import SettingsError
from gt.core.message_events import Event, Observer
from gt.core.output_files import open_text
from gt.core.settings import LogSettings
from gt.monitor.log_rows import FORMATS, row_of
from gt.monitor.records import message_seen

log = logging.getLogger("gt.dispatcher")
KEPT_FILES = 3  # files that were put aside: debug.log.1 is the newest of them


def open_log(settings: LogSettings) -> Observer | None:
    """An observer that writes to a file; None without a path, so that an unused log costs nothing."""
    if not settings.path:
        return None
    try:
        file = open_text(settings.path)
    except OSError as error:
        raise SettingsError(f"GT_INSTRUCTION_LOG={settings.path!r} cannot be written: {error}") from None
    return InstructionLog(file, str(Path(settings.path).absolute()), settings.format, settings.max_bytes)


class InstructionLog:
    """An observer that writes one line for each event to a file. When the file would have more than `max_bytes`, it is
    put aside and a new one is begun; devices and pipes are never put aside."""

    def __init__(self, file: TextIO, path: str = "", format: str = "text", max_bytes: int | None = None) -> None:
        self._file = file
        self.path = path
        self._format = FORMATS[format]
        self._max_bytes = max_bytes if Path(path).is_file() else None
        self._written = 0
        self._start = time.monotonic()
        self._sequence = itertools.count(1)
        self._is_full = False
        self._write(self._format.header)

    def __call__(self, event: Event) -> None:
        row = row_of(message_seen(event), time.monotonic() - self._start, next(self._sequence))
        self._write(self._format.line(row))

    def _write(self, text: str) -> None:
        """A log that cannot be written, on a full disk for example, ends with a warning; the dispatcher goes on."""
        if self._is_full:
            return
        try:
            if self._max_bytes is not None:
                self._make_room(len(text.encode()), self._max_bytes)
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._is_full = True
            log.warning("the instruction log %s ends here: %s", self.path, error)

    def _make_room(self, nbytes: int, max_bytes: int) -> None:
        if self._written > len(self._format.header) and self._written + nbytes > max_bytes:
            self._file.close()
            for number in range(KEPT_FILES, 0, -1):
                older = f"{self.path}.{number - 1}" if number > 1 else self.path
                with contextlib.suppress(FileNotFoundError):
                    os.replace(older, f"{self.path}.{number}")
            self._file = open_text(self.path)
            self._file.write(self._format.header)
            self._written = len(self._format.header)
        self._written += nbytes

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing tries once more to write the buffer
            self._file.close()
