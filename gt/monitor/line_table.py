"""Tables of what a program did, by line: as aligned text, for a terminal, and as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple, TypeAlias

import msgspec
from rich.table import Table

from gt.core.message_events import ProgramWaited, WorkerRan
from gt.core.messages import Ran, Swapped
from gt.core.tables import count, print_bytes, print_seconds, short_site
from gt.sharding.spec_text import describe_whole

SiteText: TypeAlias = Callable[[int], str]
"""A line of the program, by the id of its site."""


class CollectiveUse(msgspec.Struct, frozen=True):
    """Collectives of one kind: their number, and the bytes that all workers together received."""

    kind: str
    count: int
    bytes: int


class LineUse(msgspec.Struct, frozen=True):
    """A line of a program, empty for commands that belong to none, and its code. Times are nanoseconds.

    - `ops`: ops of the program, each counted once for all its workers; `commands`: these and moves, uploads and the
      like, by name
    - `layouts` of the results, and `changes`: pairs of the layout that a tensor had and the one that was needed
    - `bytes`: received by all workers, in all collectives
    - `worked` and `waited`: of all workers together, in commands and in exchanges; `worked_by_worker`: by worker
    - `program_waited`: the time that the program waited here for values
    """

    line: str
    code: str
    ops: int
    commands: dict[str, int]
    layouts: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]
    collectives: tuple[CollectiveUse, ...]
    bytes: int
    worked: int
    waited: int
    worked_by_worker: dict[int, int]
    program_waited: int


class LineSummary:
    """Sums up records by line. `site_text` names the lines of exchanges, which may be for another line than the command
    that waits for them."""

    def __init__(self, site_text: SiteText) -> None:
        self._site_text = site_text
        self._lines: dict[str, _Line] = {}
        self._swaps: Counter[tuple[int, int]] = Counter()

    def add(self, record: WorkerRan | ProgramWaited) -> None:
        if isinstance(record, ProgramWaited):
            self._line(record.site).program_waited += record.end - record.start
            return
        ran = record.ran
        waited = sum(swap.end - swap.start for swap in ran.swaps)
        self._line(record.site).add(record.worker, ran, ran.end - ran.start - waited)
        for swap in ran.swaps:
            self._swaps[record.worker, swap.target] += 1
            site = self._site_text(swap.site) if swap.site else record.site
            self._line(site).add_swap(swap, self._swaps[record.worker, swap.target])

    def _line(self, site: str) -> _Line:
        found = self._lines.get(site)
        if found is None:
            found = self._lines[site] = _Line()
        return found

    def lines(self, code_of: Callable[[str], str]) -> list[LineUse]:
        """The lines in the order in which they first did something."""
        return [line.use(site, code_of(site)) for site, line in self._lines.items()]


class _Line:
    """The use of one line. `_seen` are commands, by name and first output, which several workers have run."""

    def __init__(self) -> None:
        self.program_waited = 0
        self._ops = 0
        self._commands: Counter[str] = Counter()
        self._seen: set[tuple[str, int]] = set()
        self._layouts: dict[str, None] = {}
        self._changes: dict[tuple[str, str], None] = {}
        self._whole: dict[int, list[int]] = {}
        self._collectives: dict[str, set[tuple[int, int]]] = {}
        self._bytes: Counter[str] = Counter()
        self._worked: Counter[int] = Counter()
        self._waited = 0

    def add(self, worker: int, ran: Ran, worked: int) -> None:
        self._worked[worker] += worked
        output = ran.outputs[0] if ran.outputs else ran.start
        if (ran.op, output) not in self._seen:
            self._seen.add((ran.op, output))
            self._commands[ran.op] += 1
            self._ops += ran.ops
            self._layouts.update(dict.fromkeys(ran.layouts))
            self._changes.update(dict.fromkeys(ran.moves))
        if ran.outputs and not ran.layouts:
            self._whole.setdefault(output, []).append(worker)

    def add_swap(self, swap: Swapped, number: int) -> None:
        """Add an exchange. `number` tells those for one tensor apart, so that each counts once for all its workers."""
        self._waited += swap.end - swap.start
        self._bytes[swap.kind] += sum(nbytes for _, nbytes in swap.receives)
        self._collectives.setdefault(swap.kind, set()).add((swap.target, number))

    def use(self, site: str, code: str) -> LineUse:
        whole = {tuple(sorted(set(workers))) for workers in self._whole.values()}
        collectives = [CollectiveUse(kind, len(found), self._bytes[kind]) for kind, found in self._collectives.items()]
        return LineUse(
            site,
            code,
            self._ops,
            dict(self._commands.most_common()),
            (*self._layouts, *[describe_whole(workers) for workers in sorted(whole)]),
            tuple(self._changes),
            tuple(sorted(collectives, key=lambda use: -use.bytes)),
            self._bytes.total(),
            self._worked.total(),
            self._waited,
            dict(sorted(self._worked.items())),
            self.program_waited,
        )


HEADERS = ("line", "code", "ops", "layouts", "collectives", "bytes", "workers", "waits", "reads")
_NUMBERS = frozenset(("bytes", "workers", "waits", "reads"))
_WIDTHS = {"code": 40, "ops": 34, "layouts": 52, "collectives": 34}
_CUT_WIDTHS = {"code": 24, "ops": 18}  # widths in a terminal
_WRAPPED = frozenset(("layouts", "collectives"))
SHOWN = 2  # names in one cell, then how many more

ORDERS = {
    "time": lambda line: max(line.worked + line.waited, line.program_waited),
    "bytes": lambda line: line.bytes,
    "waits": lambda line: line.waited + line.program_waited,
}


class LineTable(NamedTuple):
    """Rows of cells, one for each line and a last one for the sum of all; and `notes` about what is not shown."""

    rows: list[tuple[str, ...]]
    notes: list[str]


def line_table(lines: Sequence[LineUse], order: str, limit: int | None, gaps: str) -> LineTable:
    """The table of the first `limit` lines in an order, a key of ORDERS. `gaps` says what was not recorded."""
    ordered = sorted(lines, key=lambda line: -ORDERS[order](line))
    shown, hidden = ordered[:limit], ordered[len(ordered[:limit]) :]
    names = _short_names([line.line for line in shown])
    rows = [_row(names[line.line], line) for line in shown]
    notes = [f"not complete: {gaps}"] if gaps else []
    if hidden:
        rest = sum(line.worked + line.waited for line in hidden), sum(line.bytes for line in hidden)
        notes.append(
            f"{count(len(hidden), 'line')} not shown, with {print_seconds(rest[0] / 1e9)} of the workers and "
            f"{print_bytes(rest[1])}; limit=None shows all"
        )
    return LineTable([*rows, _row("all", _sum(lines))], notes)


def _short_names(lines: Iterable[str]) -> dict[str, str]:
    """Lines without the folders of their files, unless two would look the same."""
    short = {line: short_site(line) or "(no line)" for line in lines}
    often = Counter(short.values())
    return {line: name if often[name] == 1 else line for line, name in short.items()}


def _row(name: str, line: LineUse) -> tuple[str, ...]:
    changes = [f"{source} -> {target}" for source, target in line.changes]
    kinds = [f"{use.count} {use.kind} {print_bytes(use.bytes)}" for use in line.collectives]
    return (
        name,
        line.code,
        _ops(line),
        _some([*changes, *line.layouts], "; "),
        _some(kinds, "; "),
        print_bytes(line.bytes) if line.bytes else "",
        *[print_seconds(time / 1e9) if time else "" for time in (line.worked, line.waited, line.program_waited)],
    )


def _ops(line: LineUse) -> str:
    """The ops of a line, without `aten.` and overloads: `4: mm 2, add 2`."""
    names: Counter[str] = Counter()
    for name, often in line.commands.items():
        names[name.split(".")[1] if "." in name else name] += often
    texts = [name if often == 1 else f"{name} {often}" for name, often in names.items()]
    found = _some(texts, ", ") if texts else ""
    return f"{line.ops}: {found}" if line.ops and found else found or (str(line.ops) if line.ops else "")


def _some(texts: Sequence[str], separator: str) -> str:
    rest = f"{separator}+{len(texts) - SHOWN}" if len(texts) > SHOWN else ""
    return separator.join(texts[:SHOWN]) + rest


def _sum(lines: Sequence[LineUse]) -> LineUse:
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    by_worker: Counter[int] = Counter()
    for line in lines:
        by_worker.update(line.worked_by_worker)
        for use in line.collectives:
            counts[use.kind] += use.count
            nbytes[use.kind] += use.bytes
    return LineUse(
        "",
        "",
        sum(line.ops for line in lines),
        {},
        (),
        (),
        tuple(CollectiveUse(kind, counts[kind], nbytes[kind]) for kind in counts),
        sum(line.bytes for line in lines),
        sum(line.worked for line in lines),
        sum(line.waited for line in lines),
        dict(by_worker),
        sum(line.program_waited for line in lines),
    )


# Forms of a table


def as_text(table: LineTable) -> str:
    """Aligned columns; long cells are cut."""
    rows = [HEADERS, *[[_cut(cell, header) for cell, header in zip(row, HEADERS, strict=True)] for row in table.rows]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if header in _NUMBERS else cell.ljust(width)
            for cell, width, header in zip(row, widths, HEADERS, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *table.notes])


def _cut(cell: str, header: str) -> str:
    width = _WIDTHS.get(header, len(cell))
    return cell if len(cell) <= width else cell[: width - 3] + "..."


def as_terminal_table(table: LineTable) -> Table:
    """The columns that have something to show. Long cells take several lines, or are cut."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    used = [position for position in range(len(HEADERS)) if any(row[position] for row in table.rows)]
    for header in [HEADERS[position] for position in used]:
        justify = "right" if header in _NUMBERS else "left"
        width = _CUT_WIDTHS.get(header)
        shown.add_column(header, justify=justify, no_wrap=header not in _WRAPPED, max_width=width)  # type: ignore[arg-type]
    for number, row in enumerate(table.rows, 1):
        shown.add_row(*[_plain(row[position]) for position in used], style="bold" if number == len(table.rows) else "")
    if table.notes:
        shown.caption = _plain("\n".join(table.notes))
    return shown


def _plain(cell: str) -> str:
    """A cell whose brackets are no markup."""
    return cell.replace("[", "\\[")


def as_html(table: LineTable) -> str:
    head = "".join(f"<th>{header}</th>" for header in HEADERS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"
