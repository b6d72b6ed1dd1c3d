"""A picture as a separate web page: SVG inside HTML, with a title for what the pointer is over."""

from __future__ import annotations

from html import escape

from gt.monitor.timeline_shapes import Box, Label, Line, Scene, Shape

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
