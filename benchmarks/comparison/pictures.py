"""A picture for each workload: its ratios as horizontal bars on a logarithmic scale, as SVG."""

from __future__ import annotations

import math
from html import escape

from benchmarks.comparison.catalog import Workload
from benchmarks.comparison.figures import Row

WIDTH, BAR, GAP, LEFT, TOP, RIGHT = 760, 16, 8, 260, 44, 60
OURS, THEIRS, LINE, TEXT = "#2563eb", "#94a3b8", "#64748b", "#334155"


def draw(workload: Workload, rows: list[Row]) -> str:
    """Empty if the workload has no ratios. Bars begin at 1, which is the baseline: to the right is slower."""
    case = workload.cases[0]
    bars = [(row.label, row.cells[case].ratio) for row in rows if case in row.cells and row.cells[case].ratio]
    ratios = [ratio for _, ratio in bars if ratio is not None]
    if not ratios:
        return ""
    low, high = math.floor(min(0.0, math.log10(min(ratios)))), math.ceil(max(0.3, math.log10(max(ratios))))

    def place(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(ratio) - low) / (high - low)

    height = TOP + len(bars) * (BAR + GAP) + 24
    title = f"{workload.name}: {workload.title}, {case}: times {workload.baseline} (logarithmic)"
    parts = [_text(8, 20, title, size=14)]
    for power in range(low, high + 1):
        x = place(10.0**power)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 22}" stroke="{LINE}" opacity="0.3"/>'
        )
        parts.append(_text(x, height - 8, f"{10.0**power:g}", anchor="middle"))
    for number, (label, ratio) in enumerate(bars):
        assert ratio is not None
        parts += _bar(label, ratio, TOP + number * (BAR + GAP), place(1.0), place(ratio))
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n{inside}\n</svg>\n'
    )


def _bar(label: str, ratio: float, y: int, one: float, end: float) -> list[str]:
    colour = OURS if label.startswith("GT") else THEIRS
    left, width = min(one, end), max(2.0, abs(end - one))
    return [
        _text(LEFT - 8, y + BAR - 4, label, anchor="end"),
        f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
        _text(max(one, end) + 4, y + BAR - 4, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{TEXT}" text-anchor="{anchor}">{escape(text)}</text>'
