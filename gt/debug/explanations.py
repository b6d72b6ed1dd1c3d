"""What a block of a program did, line by line: `gt.explain`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import cache
from typing import TextIO

import msgspec
from rich.console import Console

from gt.client import active_session
from gt.client.layouts import read_layout
from gt.client.model_layout import laid_out_models, undecided_tensors
from gt.client.parameter_layouts import belongings, layout_beside
from gt.client.recordings import CommandRecording
from gt.client.session import Session
from gt.client.tensor import Tensor
from gt.core.errors import GTError, nearest
from gt.core.message_events import ProgramWaited, WorkerRan
from gt.core.messages import MAX_RECORDED
from gt.core.tables import print_bytes
from gt.monitor.chrome_trace import describe_gaps
from gt.monitor.line_table import (
    ORDERS,
    LineSummary,
    LineTable,
    LineUse,
    as_html,
    as_terminal_table,
    as_text,
    line_table,
)

SHOWN_NAMES = 4


def layout_notes() -> list[str]:
    """The notes about all models and optimizers of the session."""
    if active_session.current().alone:
        return []
    notes: list[str] = []
    names: dict[int, str] = {}
    for model in laid_out_models():
        names |= {id(parameter): name for name, parameter in model.named_parameters()}
        whole = undecided_tensors(model)
        if whole:
            nbytes = print_bytes(sum(tensor.nbytes for tensor in whole.values()))
            notes.append(f"whole on each worker, as no pattern of `model` names them: {_some(list(whole))} ({nbytes})")
    plain, apart = [], []
    for parameter, entry, value in belongings():
        name = f"{entry} of {names.get(id(parameter), f'a parameter {list(parameter.shape)}')}"
        if not isinstance(value, Tensor):
            plain.append(name)
        elif _is_apart(parameter, value):
            apart.append(f"{name} [{value.spec}]")
    if plain:
        notes.append(f"in this program, not on the workers of the parameter: {_some(plain)}")
    if apart:
        notes.append(f"not laid out as the parameter: {_some(apart)}")
    return notes


def _is_apart(parameter: Tensor, value: Tensor) -> bool:
    """Whether a tensor could lie as its parameter, and does not. A gradient may be partial until it is needed."""
    expected, own = layout_beside(parameter, value.shape), read_layout(value._ref)
    if expected is None or own.partial:
        return False
    return own.normal(tuple(value.shape)) is not expected.normal(tuple(value.shape))


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join([*names[:SHOWN_NAMES], *([f"{more} more"] if more > 0 else [])])


class Explanation:
    """What each line of the program did inside `with gt.explain() as e:`, printed when the block ends. `lines` are the
    records, `bytes` is what all workers received from each other, `dropped` counts the commands that there was no room
    for, and `notes` tell of layouts that cost memory or bytes.

    >>> with open("lines.txt", "w") as file, gt.explain(file=file) as e:
    ...     y = gt.ones(4).sum().item()
    >>> sum(line.ops for line in e.lines), e.bytes
    (2, 0)
    """

    def __init__(self, file: TextIO | None, limit: int | None, order: str) -> None:
        self.lines: list[LineUse] = []
        self.dropped = 0
        self.notes: list[str] = []
        self._file = file
        self._limit = limit
        self._order = order

    def __enter__(self) -> Explanation:
        session = self._session = active_session.current()
        session.wait_for_work()  # exchanges from before are not part of the block
        self._recording = session.recordings.begin(MAX_RECORDED)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with contextlib.suppress(GTError) if kind is not None else contextlib.nullcontext():
            self._end()
        if kind is None:
            self._print()

    def _end(self) -> None:
        session, recording = self._session, self._recording
        try:
            session.wait_for_work()
        finally:
            session.recordings.end(recording)
        self.lines, self.dropped = _lines(session, recording), recording.dropped
        self.notes = layout_notes()

    @property
    def bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    def table(self) -> str:
        """The table as aligned columns."""
        return as_text(self._table())

    def json(self) -> str:
        """All lines as JSON, with all fields of their records."""
        fields = {"lines": self.lines, "bytes": self.bytes, "dropped": self.dropped, "notes": self.notes}
        return msgspec.json.encode(fields).decode()

    def _repr_html_(self) -> str:
        return as_html(self._table())

    def _table(self) -> LineTable:
        table = line_table(self.lines, self._order, self._limit, describe_gaps(self.dropped, ()))
        return table._replace(notes=[*table.notes, *self.notes])

    def _print(self) -> None:
        file = self._file or sys.stdout
        if file.isatty():
            Console(file=file).print(as_terminal_table(self._table()))
        else:
            print(self.table(), file=file)


def explain(*, file: TextIO | None = None, limit: int | None = 30, sort: str = "time") -> Explanation:
    """Print what each line of the program does inside: `with gt.explain(): ...`. At most `limit` lines are shown, those
    with the most `sort` first: "time" of workers, "bytes" between workers, or "waits".

    >>> with gt.explain() as e:
    ...     y = gt.ones(4).sum().item()
    line ...code ...ops ...
    """
    if sort not in ORDERS:
        raise ValueError(f"lines cannot be sorted by {sort!r}: {nearest(sort, ORDERS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"a table of {limit} lines is not possible; limit=None shows all")
    return Explanation(file, limit, sort)


def _lines(session: Session, recording: CommandRecording) -> list[LineUse]:
    code: dict[str, str] = {}

    @cache
    def name(site: int) -> str:
        line = session.sites.text(site)
        code[line] = session.sites.code(site)
        return line

    summary = LineSummary(name)
    for worker, ran in recording.ran:
        summary.add(WorkerRan(worker, ran, name(ran.site) if ran.site else ""))
    for start, end, site in recording.waits:
        summary.add(ProgramWaited(session.welcome.ident, start, end, name(site) if site else ""))
    return summary.lines(lambda line: code.get(line, ""))
