"""The rows of an instruction log and of the log of a trace: made from records, as text or JSON, and read again.

elapsed s   seq  direction    peer      command      bytes  ids     op               site         details
   0.0132     7  WORKER_SEND  worker 0  WorkerRunOp      -  1,2->3  aten.mm.default  train.py:12  scope=forward
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TextIO
from urllib.parse import unquote

import msgspec

from gt.core.errors import SettingsError
from gt.core.ids import short_id
from gt.core.message_events import Details, Event, Observer
from gt.core.output_files import open_text
from gt.core.settings import LogSettings
from gt.monitor.activity import MessageSeen, message_seen

COLUMNS = ("elapsed s", "seq", "direction", "peer", "command", "bytes", "ids", "op", "site", "details")
_LINE = "{:>12}  {:>9}  {:<11}  {:<12}  {:<19}  {:>13}  {:<24}  {:<44}  {:<24}  {}"
_SHOWN_IDS = 4


class LogRow(msgspec.Struct, frozen=True, rename={"elapsed": "elapsed_s", "nbytes": "bytes"}):
    """One row. `elapsed` is in seconds. `nbytes` is None if no tensor travels, and texts are empty if there is none.
    `details` are names with values, such as `shape` and `4x8`."""

    elapsed: float
    seq: int
    direction: str
    peer: str
    command: str
    nbytes: int | None
    ids: str
    op: str
    site: str
    details: dict[str, str]


def row_of(seen: MessageSeen, elapsed: float, seq: int) -> LogRow:
    details = (*seen.details, ("request", short_id(seen.request))) if seen.request else seen.details
    return LogRow(
        round(elapsed, 6),
        seq,
        seen.direction,
        seen.peer,
        seen.command,
        seen.nbytes if seen.nbytes >= 0 else None,
        print_ids(seen.inputs, seen.outputs),
        printable(seen.op),
        printable(seen.site),
        {name: printable(value) for name, value in details},
    )


def printable(text: str) -> str:
    """Names of a program's files, ops and scopes may have any character, newlines and halves of pairs among them."""
    return "".join([character if character.isprintable() else "?" for character in text])


def print_ids(inputs: Iterable[int], outputs: Iterable[int]) -> str:
    """Ids without their session: `1,2->3`."""
    ends = [",".join(map(short_id, ids)) for ids in (inputs, outputs)]
    return "->".join(ends) if ends[1] else ends[0]


# Writing


class LogFormat(NamedTuple):
    """How a log is written: `header` begins each file; `line` prints a row. Both end with a newline if not empty."""

    header: str
    line: Callable[[LogRow], str]


def print_row(row: LogRow) -> str:
    """A row in aligned columns. What is too long for the columns of ids and ops is shortened."""
    cells = (
        f"{row.elapsed:.6f}",
        row.seq,
        row.direction,
        row.peer,
        row.command,
        "-" if row.nbytes is None else row.nbytes,
        _shorten(_few_ids(row.ids), 24),
        _shorten(_cell(row.op), 44),
        _cell(row.site),
        print_details(tuple(row.details.items())),
    )
    return _LINE.format(*[cell if cell != "" else "-" for cell in cells]) + "\n"


def print_details(details: Details) -> str:
    """Details as text, `shape=4x8 spec=x,-`: spaces and `%` are URL-escaped."""
    return " ".join([f"{name}={value.replace('%', '%25').replace(' ', '%20')}" for name, value in details])


def encode_row(row: LogRow) -> str:
    return msgspec.json.encode(row).decode() + "\n"


FORMATS = {"text": LogFormat(_LINE.format(*COLUMNS) + "\n", print_row), "jsonl": LogFormat("", encode_row)}


def _cell(text: str) -> str:
    """Text without the two spaces that separate columns."""
    return re.sub(" {2,}", " ", text.strip())


def _few_ids(ids: str) -> str:
    """At most four ids on each side of the arrow, then how many more."""
    sides = [side.split(",") for side in ids.split("->")]
    return "->".join(
        [",".join(side[:_SHOWN_IDS]) + (f",+{len(side) - _SHOWN_IDS}" if side[_SHOWN_IDS:] else "") for side in sides]
    )


def _shorten(text: str, width: int) -> str:
    """Text shortened to the width of its column."""
    return text if len(text) <= width else text[: width - 1] + "…"


# Reading


def read_rows(path: Path) -> list[LogRow]:
    """The rows of a log, in either format. A last line that was not written to its end is left out. Raises
    SettingsError if the file cannot be read or is no such log."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as a log: {error}") from None
    *lines, _ = text.split("\n")  # what follows the last newline is empty, or not complete
    if not lines:
        raise SettingsError(f"{path} is empty; a log has a line for each message")
    if lines[0].startswith("{"):
        return [_parse(path, number, line, _decode) for number, line in enumerate(lines, 1)]
    if tuple(re.split(" {2,}", lines[0].strip())) != COLUMNS:
        raise SettingsError(
            f"{path}:1: this is no instruction log, nor the log of a trace: it begins with {_shorten(lines[0], 60)!r}, "
            f"not with the columns {', '.join(COLUMNS)} or a JSON object"
        )
    return [_parse(path, number, line, _scan) for number, line in enumerate(lines[1:], 2)]


def _parse(path: Path, number: int, line: str, parse: Callable[[str], LogRow]) -> LogRow:
    try:
        return parse(line)
    except ValueError as error:  # msgspec's errors are too
        raise SettingsError(f"{path}:{number}: this row cannot be read: {error}: {_shorten(line, 120)!r}") from None


def _decode(line: str) -> LogRow:
    return msgspec.json.decode(line, type=LogRow)


def _scan(line: str) -> LogRow:
    cells = ["" if cell == "-" else cell for cell in re.split(" {2,}", line.strip())]
    if len(cells) != len(COLUMNS):
        raise ValueError(f"it has {len(cells)} columns, not {len(COLUMNS)}")
    elapsed, seq, direction, peer, command, nbytes, ids, op, site, details = cells
    return LogRow(
        float(elapsed),
        int(seq),
        direction,
        peer,
        command,
        int(nbytes) if nbytes else None,
        ids,
        op,
        site,
        dict(map(_scan_detail, details.split())),
    )


def _scan_detail(token: str) -> tuple[str, str]:
    name, equals, value = token.partition("=")
    if not equals:
        raise ValueError(f"{token!r} among the details is not of the form name=value")
    return name, unquote(value)


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
