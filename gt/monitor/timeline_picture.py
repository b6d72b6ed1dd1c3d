"""A picture as a PNG file, by matplotlib, which is an extra: `pip install gt-tensor[pictures]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gt.core.environment import load_extra
from gt.core.errors import SettingsError
from gt.core.output_files import open_binary
from gt.monitor.timeline_shapes import Box, Label, Line, Scene, Shape

UNITS = 100  # units of a scene in an inch
_POINTS = 72 / UNITS  # points in a unit: fonts and lines are measured in points
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def save_picture(scene: Scene, path: Path, dpi: float) -> None:
    """Raises SettingsError if matplotlib is not installed or the file cannot be written."""
    matplotlib = load_extra("matplotlib", "pictures", "a PNG file of a timeline, unlike a web page (--html),")
    figures = load_extra("matplotlib.figure", "pictures", "a PNG file")
    figure = figures.Figure(figsize=(scene.width / UNITS, scene.height / UNITS), dpi=dpi)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.set_axis_off()
    # text of the user's program is drawn as it is, and not read as a formula
    with matplotlib.rc_context({"hatch.linewidth": 1.2, "text.parse_math": False, "font.family": "DejaVu Sans"}):
        _draw(axes, scene.shapes)
        try:
            with open_binary(path) as file:
                figure.savefig(file, dpi=dpi, format="png", pil_kwargs={"optimize": True})
        except OSError as error:
            raise SettingsError(f"the picture cannot be written to {path}: {error}") from None


def _draw(axes: Any, shapes: Sequence[Shape]) -> None:
    """Draw shapes, the later ones over the earlier ones."""
    patches = load_extra("matplotlib.patches", "pictures", "a PNG file")
    for order, shape in enumerate(shapes):
        if isinstance(shape, Label):
            _draw_label(axes, shape, order)
            continue
        for patch in _box(patches, shape) if isinstance(shape, Box) else _line(patches, shape):
            patch.set_zorder(order)
            axes.add_patch(patch)


def _box(patches: Any, box: Box) -> Iterator[Any]:
    look: dict[str, Any] = {"facecolor": box.fill, "edgecolor": box.edge or "none", "linewidth": 0.5}
    yield patches.Rectangle((box.x, box.y), box.width, box.height, alpha=box.opacity, **look)
    if box.hatch:
        look = {"facecolor": "none", "edgecolor": box.hatch, "hatch": "////", "linewidth": 0}
        yield patches.Rectangle((box.x, box.y), box.width, box.height, **look)


def _line(patches: Any, line: Line) -> Iterator[Any]:
    yield patches.FancyArrowPatch(
        (line.x1, line.y1),
        (line.x2, line.y2),
        arrowstyle="-|>,head_length=3.5,head_width=1.8" if line.has_head else "-",
        shrinkA=0,
        shrinkB=0,
        color=line.color,
        linewidth=line.width * _POINTS,
        alpha=line.opacity,
    )


def _draw_label(axes: Any, label: Label, order: int) -> None:
    axes.text(
        label.x,
        label.y,
        label.text,
        fontsize=label.size * _POINTS,
        color=label.color,
        ha=_ANCHORS[label.anchor],
        va="center",
        weight="bold" if label.is_bold else "normal",
        zorder=order,
    )


_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<title>{title}</title>
<style>
body {{ margin: 0; background: #ffffff; font-family: {font}; }}
svg {{ display: block; width: 100%; height: auto; }}
rect:hover, line:hover {{ stroke: #1f2328; stroke-width: 1.5; }}
text {{ pointer-events: none; }}
</style>
</head>
<body>
{svg}
</body>
</html>
"""


def print_html(scene: Scene) -> str:
    hatches = sorted({shape.hatch for shape in scene.shapes if isinstance(shape, Box) and shape.hatch})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {scene.width:g} {scene.height:g}" '
        f'font-family="{_FONT}" role="img">',
        "<defs>",
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="context-stroke"/></marker>',
        *[_pattern(color) for color in hatches],
        "</defs>",
        *map(_print, scene.shapes),
        "</svg>",
    ]
    return _PAGE.format(title=escape(scene.title), font=_FONT, svg="\n".join(parts))


def _pattern(color: str) -> str:
    return (
        f'<pattern id="{_name(color)}" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="2" height="7" fill="{color}"/></pattern>'
    )


def _name(color: str) -> str:
    return f"stripes-{color.removeprefix('#')}"


def _print(shape: Shape) -> str:
    if isinstance(shape, Box):
        return _print_box(shape)
    if isinstance(shape, Line):
        head = ' marker-end="url(#head)"' if shape.has_head else ""
        return (
            f'<line x1="{shape.x1:.2f}" y1="{shape.y1:.2f}" x2="{shape.x2:.2f}" y2="{shape.y2:.2f}" '
            f'stroke="{shape.color}" stroke-width="{shape.width:g}" opacity="{shape.opacity:g}"{head}>'
            f"{_title(shape.title)}</line>"
        )
    return _print_label(shape)


def _print_box(box: Box) -> str:
    place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'
    edge = f' stroke="{box.edge}" stroke-width="0.7"' if box.edge else ""
    opacity = f' opacity="{box.opacity:g}"' if box.opacity != 1 else ""
    text = f'<rect {place} fill="{box.fill}"{edge}{opacity}>{_title(box.title)}</rect>'
    if box.hatch:
        text += f'<rect {place} fill="url(#{_name(box.hatch)})">{_title(box.title)}</rect>'
    return text


def _print_label(label: Label) -> str:
    weight = ' font-weight="bold"' if label.is_bold else ""
    return (
        f'<text x="{label.x:.2f}" y="{label.y:.2f}" font-size="{label.size:g}" fill="{label.color}" '
        f'text-anchor="{label.anchor}" dominant-baseline="central"{weight}>{escape(label.text)}</text>'
    )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
