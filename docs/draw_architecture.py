"""Draws `architecture.svg`, the picture in the README: `python docs/draw_architecture.py`.

The roles and their packages are the tables below; the kinds of messages are read from `gt.core.messages`.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple, get_args

from gt.core.messages import Answer, Command, Instruction, Report

PICTURE = Path(__file__).with_name("architecture.svg")
WIDTH, HEIGHT = 980, 400
INK, PALE, FONT = "#24292f", "#57606a", "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class Box(NamedTuple):
    title: str
    lines: tuple[str, ...]
    x: int
    y: int
    width: int
    height: int
    fill: str
    package: str = ""


class Arrow(NamedTuple):
    start: tuple[int, int]
    end: tuple[int, int]
    label: str = ""
    detail: str = ""
    both_ways: bool = False


BOXES = [
    Box("Your program", ("ordinary eager PyTorch", "autograd, nn and optim are torch's"), 20, 20, 230, 76, "#fff8c5"),
    Box(
        "Client",
        ("a torch.Tensor subclass;", "one instruction for each op,", "no wait but for reads"),
        20,
        170,
        230,
        130,
        "#ddf4ff",
        "gt/client",
    ),
    Box(
        "Dispatcher",
        ("knows the layout of every tensor;", "plans each op once, inserts moves", "and collectives; holds no tensor"),
        375,
        170,
        230,
        130,
        "#dafbe1",
        "gt/dispatcher",
    ),
    Box("Worker 0", ("runs its commands in order",), 730, 30, 230, 84, "#ffebe9", "gt/worker"),
    Box("Worker 1", ("PyTorch on CPU or CUDA",), 730, 193, 230, 84, "#ffebe9", "gt/worker"),
    Box("Worker N", ("reports failures and progress",), 730, 302, 230, 84, "#ffebe9", "gt/worker"),
    Box(
        "Rules and signals",
        ("how ops and tensors may be cut",),
        375,
        20,
        230,
        76,
        "#f6f8fa",
        "gt/sharding, gt/signals",
    ),
]


def named(union: object, *examples: str) -> str:
    """`16 kinds: RunOp, FetchTensor, ...`, of which the examples are checked to exist."""
    kinds = [kind.__name__ for kind in get_args(union)]
    assert set(examples) <= set(kinds), (examples, kinds)
    return f"{len(kinds)} kinds: {', '.join(examples)}, …"


ARROWS = [
    Arrow((135, 96), (135, 170), "aten ops", both_ways=True),
    Arrow((490, 96), (490, 170), "decisions"),
    Arrow((250, 205), (375, 205), "instructions", named(Instruction, "RunOp")),
    Arrow((375, 265), (250, 265), "answers", named(Answer, "TensorRead")),
    Arrow((605, 205), (730, 205), "commands", named(Command, "RunOp")),
    Arrow((730, 265), (605, 265), "reports", named(Report, "Failed")),
    Arrow((605, 190), (730, 90)),
    Arrow((605, 285), (730, 350)),
    Arrow((845, 114), (845, 193), "tensors, by torch.distributed", both_ways=True),
    Arrow((845, 277), (845, 302), both_ways=True),
]


def text(x: float, y: float, content: str, size: int = 13, color: str = INK, weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" font-weight="{weight}" '
        f'text-anchor="middle">{escape(content)}</text>'
    )


def draw_box(box: Box) -> list[str]:
    middle = box.x + box.width / 2
    rows = [text(middle, box.y + 24, box.title, 16, weight="600")]
    rows += [text(middle, box.y + 46 + 18 * row, line, 12) for row, line in enumerate(box.lines)]
    if box.package:
        rows.append(text(middle, box.y + box.height - 8, box.package, 11, PALE))
    return [
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="8" '
        f'fill="{box.fill}" stroke="{INK}" stroke-width="1.2"/>',
        *rows,
    ]


def draw_arrow(arrow: Arrow) -> list[str]:
    (x1, y1), (x2, y2) = arrow.start, arrow.end
    tail = ' marker-start="url(#tip)"' if arrow.both_ways else ""
    ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    line = f'<line {ends} stroke="{INK}" stroke-width="1.4" marker-end="url(#tip)"{tail}/>'
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    if x1 == x2:
        words = [label(x, y + 4, arrow.label)] if arrow.label else []
    else:
        words = [text(x, y - 7, arrow.label, 13, weight="600"), text(x, y + 15, arrow.detail, 10, PALE)]
    return [line, *(words if arrow.label else [])]


def label(x: float, y: float, content: str) -> str:
    """Text on a vertical line, on a white ground."""
    width = 7 * len(content) + 8
    ground = f'<rect x="{x - width / 2:g}" y="{y - 13:g}" width="{width}" height="18" fill="white"/>'
    return ground + text(x, y, content, 12)


def draw() -> str:
    tip = (
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M 0 0 L 10 5 L 0 10 z" fill="{INK}"/></marker></defs>'
    )
    parts = [part for arrow in ARROWS for part in draw_arrow(arrow)] + [part for box in BOXES for part in draw_box(box)]
    title = "<title>A program's client sends instructions to the dispatcher, which sends commands to workers</title>"
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}">'
    return "\n".join([head, title, tip, ground, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
