"""Meshes and layouts as HTML, which notebooks show."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from gt.core.tables import html_table, html_text

if TYPE_CHECKING:
    from gt.sharding.spec import DeviceMesh, ShardingSpec

SHOWN_WORKERS = 256  # larger meshes are shown as text


def mesh_html(mesh: DeviceMesh) -> str:
    """The grid of a mesh: its last axis goes across and the one before it down; other axes give several grids."""
    if not mesh.shape or mesh.size > SHOWN_WORKERS:
        return html_text(f"mesh {mesh}")
    *outer, down, across = (1, *mesh.shape) if len(mesh.shape) == 1 else mesh.shape
    names = mesh.axis_names
    header = ["", *[f"{names[-1]}={column}" for column in range(across)]]
    workers = iter(mesh.workers)
    grids = []
    for place in itertools.product(*map(range, outer)):
        caption = ", ".join([f"mesh {mesh}", *[f"{axis}={at}" for axis, at in zip(names, place, strict=False)]])
        labels = [f"{names[-2]}={row}" if len(names) > 1 else "" for row in range(down)]
        rows = [[label, *[f"worker {next(workers)}" for _ in range(across)]] for label in labels]
        grids.append(html_table(caption, header, rows))
    return "".join(grids)


def spec_html(spec: ShardingSpec) -> str:
    """The dims of a layout, with the mesh axes that cut them."""
    rows = [_dim_row(spec, dim) for dim in range(len(spec.dims))]
    if spec.partial:
        rows.append(("all", f"partial along {' '.join(spec.partial)}: to be reduced by {spec.kind}", ""))
    return html_table(f"[{spec}] on mesh {spec.mesh}", ("dim", "cut along", "parts"), rows)


def _dim_row(spec: ShardingSpec, dim: int) -> tuple[str, str, str]:
    axes, cuts = spec.dims[dim], spec.cuts[dim]
    if not axes:
        return str(dim), "-", "1"
    parts = 1
    for axis in axes:
        parts *= spec.mesh.axis_size(axis)
    return str(dim), " ".join(axes), str(parts) if cuts is None else " ".join(f"{start}:{stop}" for start, stop in cuts)
