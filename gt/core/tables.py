"""Tables for people: rows of a log, written one by one, and HTML of notebooks."""

from __future__ import annotations

import html
import itertools
import logging
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from gt.core.messages import ListedSession, ListedWorker
from gt.core.meta import TensorMeta


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str] = ()) -> str:
    """A table. `colours` are the backgrounds of its rows, on which black text is readable."""
    head = f"<tr>{_cells('th', header)}</tr>" if header else ""
    styles = [f' style="background:{colour};color:black"' for colour in colours] or [""] * len(rows)
    body = "".join(f"<tr{style}>{_cells('td', row)}</tr>" for row, style in zip(rows, styles, strict=True))
    return f"<table><caption>{html.escape(caption)}</caption>{head}{body}</table>"


def html_text(text: str) -> str:
    """Text as it is, with its spaces and newlines."""
    return f"<pre>{html.escape(text)}</pre>"


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


WIDTH = 120
HEADER_EVERY = 40  # rows after which the names of the columns are written again
GAP = "  "
INDENT = "      "  # begins lines that belong to the row above

PLANS, CALLS, COMMANDS, CODE = "gt.dispatcher.plans", "gt.client.calls", "gt.worker.commands", "gt.compile.code"


class Column(NamedTuple):
    """A column of a table. Texts that are too long lose their end or, with `keeps_end`, their start, as paths do."""

    name: str
    width: int
    is_number: bool = False
    keeps_end: bool = False

    def fit(self, cell: str) -> str:
        text = shorten(cell, self.width, keeps_end=self.keeps_end)
        return text.rjust(self.width) if self.is_number else text.ljust(self.width)


class LogTable:
    """A table whose rows are messages of a logger, at the level DEBUG. `label` begins each row."""

    def __init__(self, logger: str, label: str, columns: Sequence[Column]) -> None:
        self._log = logging.getLogger(logger)
        self._label = label
        self._columns = columns
        self._rows = itertools.count()

    @property
    def is_on(self) -> bool:
        return self._log.isEnabledFor(logging.DEBUG)

    def add(self, cells: Sequence[str], below: Sequence[str] = ()) -> None:
        """Write a row, and the lines that belong to it; empty cells are written as `-`."""
        text = print_row(self._columns, [cell or "-" for cell in cells], self._label)
        lines = [text, *[INDENT + line for line in below]]
        if next(self._rows) % HEADER_EVERY == 0:
            lines.insert(0, self.header())
        self._log.debug("%s", "\n".join(lines))

    def header(self) -> str:
        return print_row(self._columns, [column.name for column in self._columns], " " * len(self._label))


def print_row(columns: Sequence[Column], cells: Sequence[str], label: str) -> str:
    fitted = [column.fit(cell) for column, cell in zip(columns, cells, strict=True)]
    return GAP.join([label, *fitted]).rstrip()


def align(rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), width: int = WIDTH - len(INDENT)) -> list[str]:
    """Rows with columns as wide as their widest cell; those at the positions `numbers` are right-aligned. Lines that
    are too long lose their end."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    lines = [
        GAP.join(
            [
                cell.rjust(size) if n in numbers else cell.ljust(size)
                for n, (cell, size) in enumerate(zip(row, widths, strict=False))
            ]
        )
        for row in rows
    ]
    return [shorten(line.rstrip(), width) for line in lines]


def shorten(text: str, width: int, *, keeps_end: bool = False) -> str:
    """Text of at most `width` characters, with an ellipsis where something is left out."""
    if len(text) <= width:
        return text
    return "…" + text[len(text) - width + 1 :] if keeps_end else text[: width - 1] + "…"


_SHOWN_TENSORS = 4
_LONG_KINDS = {"float": "f", "int": "i", "uint": "u", "complex": "c", "bfloat": "bf"}


def ticks(seconds: float) -> list[float]:
    """Round times from 0 on, 4 to 10 of them."""
    if seconds <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(seconds))
    step = next(step / part for part in (1, 2, 5, 10) if seconds / (step / part) >= 4)
    return [number * step for number in range(int(seconds / step + 1e-9) + 1)]


def short_site(site: str) -> str:
    return site.rpartition("/")[2]


def short_op(op: str) -> str:
    """The short name of an op for narrow columns: `mm` for `aten.mm.default`."""
    return op.removeprefix("aten.").removesuffix(".default")


def print_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds > 0 else "0"


def print_bytes(nbytes: float) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 op`, `2 ops`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def print_tensors(metas: Sequence[TensorMeta]) -> str:
    """Dtypes and shapes, `f32[8,16] i64[8]`; of many tensors the first two and how many more."""
    shown = metas if len(metas) <= _SHOWN_TENSORS else metas[:2]
    more = f" +{len(metas) - len(shown)}" if len(metas) > len(shown) else ""
    return " ".join([f"{short_dtype(meta.dtype)}[{','.join(map(str, meta.shape))}]" for meta in shown]) + more


def short_dtype(dtype: str) -> str:
    """The short name of a dtype: `f32` for `float32`."""
    found = re.fullmatch("(float|int|uint|complex|bfloat)([0-9]+)", dtype)
    return _LONG_KINDS[found[1]] + found[2] if found is not None else dtype


_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_SHOWN_WORKERS = 4  # whose bytes are shown one by one


class SessionList(list[ListedSession]):
    """Sessions in the order of their ids. It prints as a table."""

    def __repr__(self) -> str:
        heads = ("id", "key", "host", "pid", "program", "since", "tensors", "held", "in flight", "state")
        rows = [heads, *map(_session_row, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def _session_row(session: ListedSession) -> tuple[str, ...]:
    return (
        str(session.session),
        session.key or "-",
        session.host,
        str(session.pid),
        session.program or "-",
        _print_age(session.seconds),
        str(session.tensors),
        _print_held(session.held),
        str(session.in_flight),
        session.state,
    )


def _print_held(held: tuple[tuple[int, int], ...]) -> str:
    """The bytes on each worker, `0: 4 MB 1: 4 MB`; on many workers, the most and their number."""
    holding = {worker: nbytes for worker, nbytes in held if nbytes}
    if len(holding) > _SHOWN_WORKERS:
        return f"{len(holding)} workers: {print_bytes(max(holding.values()))} each at most"
    return " ".join(f"{worker}: {print_bytes(nbytes)}" for worker, nbytes in holding.items()) or "0 B"


def _print_age(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} days"


class WorkerList(list[ListedWorker]):
    """Workers in the order of their ids. It prints as a table."""

    def __repr__(self) -> str:
        rows = [("id", "host", "pid", "device", "memory", "held", "state"), *map(_row, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def _row(worker: ListedWorker) -> tuple[str, ...]:
    memory = print_bytes(worker.memory) if worker.memory else "unknown"
    held = print_bytes(worker.held)
    return (str(worker.worker), worker.host, str(worker.pid), worker.device, memory, held, worker.state)
