"""A picture as a PNG file, by matplotlib, which is an extra: `pip install gt-tensor[pictures]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
