"""The shapes that a picture consists of. The unit is a hundredth of an inch; y grows downwards."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

CHARACTER = 0.62  # the width of a character, of the size of its font
INK, PALE, GRID, PAPER = "#1f2328", "#656d76", "#d8dee4", "#ffffff"


class Box(NamedTuple):
    """A rectangle. `title` is shown when the pointer is over it; `hatch` is the colour of stripes on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""
    opacity: float = 1.0
    edge: str = ""
    hatch: str = ""


class Line(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float
    color: str = GRID
    width: float = 1.0
    has_head: bool = False
    title: str = ""
    opacity: float = 1.0


class Label(NamedTuple):
    """Text whose middle is at `y`."""

    x: float
    y: float
    text: str
    size: float = 11.0
    color: str = INK
    anchor: Literal["start", "middle", "end"] = "start"
    is_bold: bool = False


Shape: TypeAlias = Box | Line | Label


class Scene(NamedTuple):
    width: float
    height: float
    shapes: list[Shape]
    title: str


def text_width(text: str, size: float) -> float:
    """About how wide a text is."""
    return CHARACTER * size * len(text)


def fitting(text: str, width: float, size: float) -> str:
    """A text that is as wide as there is room: its end is cut off if need be; empty if there is no room for three
    characters."""
    room = int(width / (CHARACTER * size))
    if len(text) <= room:
        return text
    return text[: room - 1] + "…" if room >= 3 else ""
