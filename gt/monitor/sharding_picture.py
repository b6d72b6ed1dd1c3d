"""Pictures of where the parts of a tensor lie: a table for terminals, HTML for notebooks, SVG and PNG files."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gt.core.environment import load_extra
from gt.core.errors import SettingsError
from gt.core.output_files import open_binary, open_text
from gt.core.tables import print_bytes
from gt.sharding.held_parts import COLUMNS, HeldPart, parts_html

_SIDE, _MARGIN, _TEXT = 420, 40, 13  # pixels of a drawing


class ShardingPicture:
    """A picture of a layout. It is shown as a grid in a terminal, and as HTML in a notebook; `save` writes a file.
    `columns` is the size of the grid's last axis; one that is too wide for the terminal is shown as a list. A picture
    of a mesh has no slices."""

    def __init__(
        self,
        title: str,
        shape: Sequence[int],
        parts: Sequence[HeldPart],
        columns: Sequence[int] = (),
        *,
        has_slices: bool = True,
    ) -> None:
        self.title = title
        self.shape = tuple(shape)
        self.parts = tuple(parts)
        self.columns = columns[0] if columns else 1
        self.has_slices = has_slices

    def __repr__(self) -> str:
        return f"<picture of {self.title}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title)
        grid = self._grid()
        width = Measurement.get(console, options.update_width(1 << 16), grid).maximum
        yield grid if width <= options.max_width else self._list()

    def _grid(self) -> Table:
        grid = Table(show_header=False, show_lines=True, padding=0)
        for start in range(0, len(self.parts), self.columns):
            grid.add_row(*[self._cell(part) for part in self.parts[start : start + self.columns]])
        return grid

    def _cell(self, part: HeldPart) -> Text:
        lines = [part.holder, "" if part.coordinate == "-" else part.coordinate]
        if self.has_slices:
            lines += [part.slice, f"{part.shape}, {print_bytes(part.nbytes)}"]
            lines += [f"partial: {part.partial}"] if part.partial else []
        text = "\n".join(f" {line} " for line in lines if line)
        return Text(text, style=f"black on {part.colour}", justify="center")

    def _list(self) -> Table:
        table = Table()
        for name in COLUMNS:
            table.add_column(name)
        for part in self.parts:
            style = f"black on {part.colour}"
            table.add_row(*[Text(f" {cell} ", style=style) for cell in part.cells()])
        return table

    def text(self, width: int = 120) -> str:
        """The grid without colours."""
        console = Console(width=width, no_color=True, force_terminal=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _repr_html_(self) -> str:
        return parts_html(self.title, self.parts)

    def save(self, path: str | Path) -> None:
        """Write a drawing of the parts: the suffix of the file, .svg or .png, says which kind."""
        path = Path(path)
        if path.suffix == ".svg":
            with open_text(path) as file:
                file.write(self.svg())
        elif path.suffix == ".png":
            self._save_png(path)
        else:
            raise SettingsError(f"a picture is written to a file with the suffix .svg or .png, not to {path.name!r}")

    def svg(self) -> str:
        """The tensor as a rectangle of its first two dims that are cut, with a box for each different slice."""
        width, height = _SIDE + 2 * _MARGIN, _SIDE + 2 * _MARGIN
        boxes = "".join(self._svg_box(*box) for box in self._boxes())
        title = f'<text x="{_MARGIN}" y="{_MARGIN - 14}" font-weight="bold">{html.escape(self.title)}</text>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="{_TEXT}">'
            f'<rect width="{width}" height="{height}" fill="white"/>{title}{boxes}</svg>\n'
        )

    def _svg_box(self, x: float, y: float, width: float, height: float, colour: str, label: str) -> str:
        left, top = _MARGIN + x * _SIDE, _MARGIN + y * _SIDE
        lines = label.split("\n")
        middle = top + height * _SIDE / 2 - (len(lines) - 1) * _TEXT / 2
        texts = "".join(
            f'<text x="{left + width * _SIDE / 2:.1f}" y="{middle + number * (_TEXT + 3):.1f}" '
            f'text-anchor="middle">{html.escape(line)}</text>'
            for number, line in enumerate(lines)
        )
        return (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width * _SIDE:.1f}" height="{height * _SIDE:.1f}" '
            f'fill="{colour}" stroke="black"/>{texts}'
        )

    def _boxes(self) -> list[tuple[float, float, float, float, str, str]]:
        """For each different slice its place and size as shares of the rectangle, its colour and its label."""
        down, across = self._drawn_dims()
        boxes = []
        for intervals in dict.fromkeys(part.intervals for part in self.parts):
            holders = [part for part in self.parts if part.intervals == intervals]
            part = holders[0]
            y, height = _share(part.intervals, self.shape, down)
            x, width = _share(part.intervals, self.shape, across)
            workers = ", ".join(str(holder.worker) for holder in holders[:8]) + (" ..." if len(holders) > 8 else "")
            label = f"workers {workers}" if len(holders) > 1 else part.holder
            label += f"\n{part.slice}" if self.has_slices else f"\n{part.coordinate}"
            if part.partial:
                label += f"\npartial: {part.partial}"
            boxes.append((x, y, width, height, part.colour, label))
        return boxes

    def _drawn_dims(self) -> tuple[int | None, int | None]:
        """The dims that are drawn down and across: those that are cut come first."""
        dims = range(len(self.shape))
        cut = [dim for dim in dims if len({part.intervals[dim] for part in self.parts}) > 1]
        first = sorted([*cut, *[dim for dim in dims if dim not in cut]][:2])
        down = first[0] if first else None
        return (down, first[1]) if len(first) > 1 else (down, None)

    def _save_png(self, path: Path) -> None:
        figure = load_extra("matplotlib.figure", "pictures", "a PNG").Figure(figsize=(5, 5), dpi=120)
        axes = figure.add_axes((0.05, 0.05, 0.9, 0.85))
        axes.set_title(self.title, fontsize=9)
        axes.set_xlim(0, 1)
        axes.set_ylim(1, 0)
        axes.set_axis_off()
        for x, y, width, height, colour, label in self._boxes():
            axes.fill([x, x + width, x + width, x], [y, y, y + height, y + height], facecolor=colour, edgecolor="black")
            axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=8)
        with open_binary(path) as file:
            figure.savefig(file, format="png")


def _share(intervals: Sequence[tuple[int, int]], shape: Sequence[int], dim: int | None) -> tuple[float, float]:
    """The start and the length of an interval as shares of its dim."""
    if dim is None or not shape[dim]:
        return 0.0, 1.0
    start, stop = intervals[dim]
    return start / shape[dim], (stop - start) / shape[dim]
