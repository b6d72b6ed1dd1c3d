"""The margin of a timeline: the lines of the program that take the most time of workers, the lines at which the program
waits, and the kinds of exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from gt.core.tables import count, print_bytes, print_seconds, short_site
from gt.monitor.timeline_lanes import (
    COLORS,
    MEANINGS,
    READS,
    STRIPES,
    WAIT,
    kinds_of_exchanges,
    lines_of_program,
    ops_of_lines,
    waits_of_lines,
)
from gt.monitor.timeline_model import Timeline
from gt.monitor.timeline_shapes import PALE, Box, Label, Shape, fitting, text_width

TOP_LINES, TOP_WAITS, LINE_HEIGHT, ROW_HEIGHT = 9, 3, 30.0, 17.0
BOTTOM = 60.0  # height that the lines leave free, for the legend
CodeOf: TypeAlias = Callable[[str], str]
"""The text of a line of the program, from its file and number."""


def draw_margin(timeline: Timeline, x: float, width: float, top: float, height: float, code: CodeOf) -> Iterator[Shape]:
    """The lines first, and the rest as far as there is room until `height`."""
    margin = _Margin(timeline, x, width, top, height, code)
    yield from margin.lines()
    yield from margin.waits()
    yield from margin.exchanges()


class _Margin:
    """Draws the margin from top to bottom. `_y` is where the last label is."""

    def __init__(self, timeline: Timeline, x: float, width: float, top: float, height: float, code: CodeOf) -> None:
        self._timeline, self._x, self._width, self._y, self._height = timeline, x, width, top, height
        self._code = code
        self._waited = list(waits_of_lines(timeline).items())[:TOP_WAITS]
        self._kinds = kinds_of_exchanges(timeline)

    def lines(self) -> Iterator[Shape]:
        """The lines of the program that take the most time on workers, or that send most commands."""
        what = "Commands" if self._timeline.has_send_times else "Time of workers"
        yield Label(self._x, self._y, f"{what} by line", 12, is_bold=True)
        used, ops = lines_of_program(self._timeline), ops_of_lines(self._timeline)
        below = sum(22 + ROW_HEIGHT * len(rows) for rows in (self._waited, self._kinds) if rows)
        room = self._height - self._y - BOTTOM - below
        most = max(sum(spent.values()) for spent in used.values())
        visible = [(site, spent) for site, spent in used.items() if sum(spent.values()) >= most / 250]
        shown = visible[: min(TOP_LINES, max(int(room / LINE_HEIGHT), 3))]
        for at, (site, spent) in enumerate(shown):
            self._y += LINE_HEIGHT if at else 24
            yield from self._line(site, spent, ops.get(site, 0), most)
        if len(used) > len(shown):
            yield Label(self._x, self._y + 28, f"and {count(len(used) - len(shown), 'more line')}", 10, PALE)
            self._y += 14
        self._y += 10

    def _line(self, site: str, spent: dict[str, float], ops: int, most: float) -> Iterator[Shape]:
        total = sum(spent.values())
        amount = f"{total:.0f}" if self._timeline.has_send_times else f"{count(ops, 'op')}, {print_seconds(total)}"
        yield from self._row(self._y, self._name(site), amount)
        x = self._x
        for kind, color in COLORS.items():
            length = spent.get(kind, 0.0) / max(most, 1e-9) * self._width
            if length > 0:
                title = f"{site}: {MEANINGS[kind]}"
                yield Box(x, self._y + 8, length, 8, color, title, hatch=STRIPES if kind == WAIT else "")
                x += length

    def waits(self) -> Iterator[Shape]:
        """The lines at which the program waits for workers, such as a value that is read in every step."""
        rows = [
            (self._name(site), f"{count(number, 'time')}, {print_seconds(seconds)}", site)
            for site, (number, seconds) in self._waited
        ]
        yield from self._table("The program waits", rows)

    def exchanges(self) -> Iterator[Shape]:
        rows = [
            (f"{number} {kind}", print_bytes(nbytes) if nbytes else "", "")
            for kind, (number, nbytes) in self._kinds.items()
        ]
        yield from self._table("Exchanges", rows)

    def _table(self, heading: str, rows: list[tuple[str, str, str]]) -> Iterator[Shape]:
        """Rows of a name, an amount, and the title of a mark before them: as many as there is room for above the
        legend."""
        y = self._y + 34
        room = int((self._height - BOTTOM - y) / ROW_HEIGHT)
        if not rows or room < 1:
            return
        yield Label(self._x, y, heading, 12, is_bold=True)
        if len(rows) > room:
            rows = [*rows[: room - 1], (f"and {len(rows) - room + 1} more", "", "")]
        for at, (name, amount, title) in enumerate(rows, 1):
            yield from self._row(y + 2 + ROW_HEIGHT * at, name, amount)
            if title:
                yield Box(self._x - 10, y - 2 + ROW_HEIGHT * at, 6, 8, READS, title)
        self._y = y + ROW_HEIGHT * len(rows)

    def _row(self, y: float, name: str, amount: str) -> Iterator[Shape]:
        yield Label(self._x, y, fitting(name, self._width - text_width(amount, 10.5) - 8, 10.5), 10.5)
        yield Label(self._x + self._width, y, amount, 10.5, PALE, "end")

    def _name(self, site: str) -> str:
        """A line by its number and code, or by its file if the code is not known."""
        code, place = self._code(site), short_site(site)
        return f"{place.rpartition(':')[2]}: {code}" if code else place
