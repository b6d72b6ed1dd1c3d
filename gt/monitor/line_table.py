"""Tables of what a program did, by line: as aligned text, for a terminal, and as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from rich.table import Table

from gt.core.readable_units import count, print_bytes, print_seconds, short_site
from gt.monitor.line_summary import CollectiveUse, LineUse

HEADERS = ("line", "code", "ops", "layouts", "collectives", "bytes", "workers", "waits", "reads")
_NUMBERS = frozenset(("bytes", "workers", "waits", "reads"))
_WIDTHS = {"code": 40, "ops": 34, "layouts": 52, "collectives": 34}
_CUT_WIDTHS = {"code": 24, "ops": 18}  # in a terminal
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
    """`4: mm 2, add 2`, without the `aten.` and the overloads of names."""
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
