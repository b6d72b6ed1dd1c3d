"""The figures as Markdown, and the page that they are written to."""

from __future__ import annotations

from benchmarks.comparison.catalog import Workload
from benchmarks.comparison.figures import Cell, Row
from benchmarks.comparison.rounds import Result


def table(workload: Workload, rows: list[Row]) -> str:
    """A row for each variant: for each case its value, with the ratio to the baseline in brackets; then what else was
    found."""
    cases = [case for case in workload.cases if any(case in row.cells for row in rows)]
    extras = list(dict.fromkeys(title for row in rows for title in row.extras))
    titles = [workload.unit if len(cases) == 1 else f"{case}, {workload.unit}" for case in cases]
    lines = [_line(["", *titles, *extras]), _line(["---"] * (1 + len(titles) + len(extras)))]
    for row in rows:
        cells = [_cell(row.cells.get(case)) for case in cases]
        lines.append(_line([row.label, *cells, *[_number(row.extras.get(title)) for title in extras]]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return _number(cell.value) + ("" if cell.ratio is None else f" ({_number(cell.ratio)})")


def _number(value: float | None) -> str:
    """Three digits, as many of them after the point as there is room for."""
    if value is None:
        return ""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def skipped(results: list[Result], does_not_apply: dict[str, str]) -> str:
    """A sentence that names each variant and peer without a row, and the reason."""
    reasons = {each.variant.label: each.reason for each in results if each.reason} | does_not_apply
    if not reasons:
        return ""
    return "Without a row: " + "; ".join(f"{name} ({reason})" for name, reason in reasons.items()) + "."


def replace_between_markers(page: str, name: str, text: str) -> str:
    """The page with the text between the comments `<!-- name: begin -->` and `<!-- name: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has to have one {begin} and one {end}")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
