"""The instruction log: one aligned line for each message that the dispatcher receives or sends.

elapsed s   seq  direction    peer      command             bytes  ids                   op               site
   0.0132     7  WORKER_SEND  worker 0  WorkerRunOp             -  1,2->3                aten.mm.default  train.py:12
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from pathlib import Path
from typing import TextIO

from msgspec import Struct

from gt.core.errors import SettingsError
from gt.core.ids import short_id
from gt.core.message_events import Event, Observer
from gt.core.message_fields import PAYLOAD_RECORDS, byte_ranges_of, id_fields

log = logging.getLogger("gt.dispatcher")
_ROW = "{:>12}  {:>9}  {:<11}  {:<12}  {:<19}  {:>13}  {:<24}  {:<44}  {}\n"
_SHOWN_IDS = 4


def open_log(path: str) -> Observer | None:
    """An observer that writes to a file; None without a path, so that an unused log costs nothing."""
    if not path:
        return None
    try:
        file = Path(path).open("w", buffering=1 << 16)
    except OSError as error:
        raise SettingsError(f"GT_INSTRUCTION_LOG={path!r} cannot be written: {error}") from None
    return InstructionLog(file, str(Path(path).absolute()))


class InstructionLog:
    """An observer that writes one line for each event to a file."""

    def __init__(self, file: TextIO, path: str = "") -> None:
        self._file = file
        self.path = path
        self._start = time.monotonic()
        self._sequence = itertools.count(1)
        self._is_full = False
        self._write(_ROW.format("elapsed s", "seq", "direction", "peer", "command", "bytes", "ids", "op", "site"))

    def _write(self, text: str) -> None:
        """A log that cannot be written, on a full disk for example, ends with a warning; the dispatcher goes on."""
        if self._is_full:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._is_full = True
            log.warning("the instruction log %s ends here: %s", self.path, error)

    def __call__(self, event: Event) -> None:
        message = event.message
        row = _ROW.format(
            f"{time.monotonic() - self._start:.6f}",
            next(self._sequence),
            event.direction,
            event.peer,
            _name(event),
            _size(message),
            _ids(message),
            _shorten(event.op, 44) or "-",
            event.site or "-",
        )
        self._write(row.rstrip() + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing tries once more to write the buffer
            self._file.close()


def _name(event: Event) -> str:
    """The name of a message on the wire; every command to a worker begins with `Worker`."""
    if event.message is None:
        return "-"
    tag = str(event.message.__struct_config__.tag)
    return tag if event.direction != "WORKER_SEND" or tag.startswith("Worker") else f"Worker{tag}"


def _size(message: object) -> str:
    if type(message) not in PAYLOAD_RECORDS:
        return "-"
    return str(sum(byte_range.nbytes for byte_range in byte_ranges_of(message)))


def _ids(message: Struct | None) -> str:
    """Ids without their session: `1,2->3`."""
    names = id_fields(type(message)).names if message is not None else frozenset()
    ids = {name: getattr(message, name) for name in ("id", "ids", "inputs", "outputs") if name in names}
    outputs = ids.pop("outputs", ())
    first = next(iter(ids.values()), ())
    text = _id_list(first if isinstance(first, tuple) else (first,)) + (f"->{_id_list(outputs)}" if outputs else "")
    return _shorten(text, 24) or "-"


def _shorten(text: str, width: int) -> str:
    """Text shortened to the width of its column."""
    return text if len(text) <= width else text[: width - 1] + "…"


def _id_list(ids: tuple[int, ...]) -> str:
    shown = [short_id(ident) for ident in ids[:_SHOWN_IDS]]
    return ",".join(shown) + (f",+{len(ids) - _SHOWN_IDS}" if len(ids) > _SHOWN_IDS else "")
