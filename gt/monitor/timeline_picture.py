"""A picture as a PNG file, by matplotlib, which is an extra: `pip install gt-tensor[pictures]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gt.core.errors import SettingsError
from gt.monitor.timeline_shapes import Box, Label, Line, Scene

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, Rectangle
except ModuleNotFoundError as error:
    _missing: str | None = str(error)
else:
    _missing = None

UNITS = 100  # of a scene in an inch
_POINTS = 72 / UNITS  # of a unit: fonts and lines are measured in points
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def save_picture(scene: Scene, path: Path, dpi: float) -> None:
    """Raises SettingsError if matplotlib is not installed or the file cannot be written."""
    if _missing is not None:
        raise SettingsError(
            f"a PNG picture is drawn by matplotlib, which cannot be imported ({_missing}): "
            f"pip install 'gt-tensor[pictures]', or draw a web page with --html, which needs nothing"
        )
    figure = Figure(figsize=(scene.width / UNITS, scene.height / UNITS), dpi=dpi)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.set_axis_off()
    # text of the user's program is drawn as it is, and not read as a formula
    with rc_context({"hatch.linewidth": 1.2, "text.parse_math": False, "font.family": "DejaVu Sans"}):
        for order, shape in enumerate(scene.shapes):
            if isinstance(shape, Box):
                _draw_box(axes, shape, order)
            elif isinstance(shape, Line):
                _draw_line(axes, shape, order)
            else:
                _draw_label(axes, shape, order)
        try:
            figure.savefig(path, dpi=dpi, format="png", pil_kwargs={"optimize": True})
        except OSError as error:
            raise SettingsError(f"the picture cannot be written to {path}: {error}") from None


def _draw_box(axes: Axes, box: Box, order: int) -> None:
    look: dict[str, Any] = {"facecolor": box.fill, "edgecolor": box.edge or "none", "linewidth": 0.5}
    axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, zorder=order, alpha=box.opacity, **look))
    if box.hatch:
        look = {"facecolor": "none", "edgecolor": box.hatch, "hatch": "////", "linewidth": 0}
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, zorder=order, **look))


def _draw_line(axes: Axes, line: Line, order: int) -> None:
    axes.add_patch(
        FancyArrowPatch(
            (line.x1, line.y1),
            (line.x2, line.y2),
            arrowstyle="-|>,head_length=3.5,head_width=1.8" if line.has_head else "-",
            shrinkA=0,
            shrinkB=0,
            color=line.color,
            linewidth=line.width * _POINTS,
            alpha=line.opacity,
            zorder=order,
        )
    )


def _draw_label(axes: Axes, label: Label, order: int) -> None:
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
