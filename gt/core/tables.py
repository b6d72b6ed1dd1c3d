"""Tables for people: rows of a log, written one by one, and HTML of notebooks."""

from __future__ import annotations

import html
import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple


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
