"""The parts of a tensor that workers hold, for people: slices, shapes and bytes, with a colour for each part."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from gt.core.tables import html_table, print_bytes
from gt.sharding.boxes import Box, Shape, box_elements
from gt.sharding.hop_traffic import shard_indices, worker_boxes
from gt.sharding.spec import ShardingSpec, local_box

# Client and dispatcher derive the same parts in the same order from the layout, so their messages need not describe
# them.


class TensorPart(NamedTuple):
    """A box of a tensor, and the workers that hold it, in the order of the mesh. Of a partial tensor, workers with the
    same `addend` hold one of the values that are reduced, in the order of these numbers."""

    box: Box
    addend: int
    workers: tuple[int, ...]

    @property
    def elements(self) -> int:
        return box_elements(self.box)


@functools.lru_cache(maxsize=1 << 12)
def distinct_parts(spec: ShardingSpec, shape: Shape) -> tuple[TensorPart, ...]:
    """Every part once, empty ones included: by addend, then in the order of the mesh."""
    boxes = worker_boxes(spec, shape)
    addends = shard_indices(spec.mesh, spec.partial).tolist()
    edges = zip(boxes.starts.T.tolist(), boxes.stops.T.tolist(), strict=True)
    holders: dict[tuple[int, Box], list[int]] = {}
    for worker, addend, (starts, stops) in zip(spec.mesh.workers, addends, edges, strict=True):
        holders.setdefault((addend, tuple(zip(starts, stops, strict=True))), []).append(worker)
    return tuple([TensorPart(box, addend, tuple(holders[addend, box])) for addend, box in sorted(holders, key=_addend)])


@functools.lru_cache(maxsize=1 << 12)
def parts_to_read(spec: ShardingSpec, shape: Shape) -> tuple[TensorPart, ...]:
    """The parts that make up the value. Of a tensor without elements, one empty part: it may have failed."""
    parts = distinct_parts(spec, shape)
    return tuple([part for part in parts if part.elements]) or parts[:1]


def _addend(key: tuple[int, Box]) -> int:
    return key[0]


# Backgrounds on which black text is readable; parts beyond them begin again.
COLOURS = ("#a6cee3", "#b2df8a", "#fdbf6f", "#fb9a99", "#cab2d6", "#ffff99", "#8dd3c7", "#fccde5", "#d9d9d9", "#ccebc5")
COLUMNS = ("worker", "coordinate", "slice", "local shape", "memory", "partial")


HERE = -1
"""In place of a worker: this process, which holds a plain tensor."""


class HeldPart(NamedTuple):
    """The part of a tensor that a worker holds. `part` numbers the different parts: replicas have the same one.
    `intervals` are those of the tensor's dims, and `partial` names the axes along which parts have to be reduced."""

    worker: int
    coordinate: str
    part: int
    intervals: Box
    nbytes: int
    partial: str

    @property
    def holder(self) -> str:
        return "this process" if self.worker == HERE else f"worker {self.worker}"

    @property
    def slice(self) -> str:
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in self.intervals) + "]"

    @property
    def shape(self) -> str:
        return "x".join(str(stop - start) for start, stop in self.intervals) or "scalar"

    @property
    def colour(self) -> str:
        return COLOURS[self.part % len(COLOURS)]

    def cells(self) -> tuple[str, ...]:
        return (
            self.holder.removeprefix("worker "),
            self.coordinate,
            self.slice,
            self.shape,
            print_bytes(self.nbytes),
            self.partial or "-",
        )


def held_parts(shape: Shape, itemsize: int, spec: ShardingSpec) -> list[HeldPart]:
    """The part of each worker of a layout, in the order of its mesh."""
    mesh = spec.mesh
    kind = "" if spec.kind == "sum" else f" ({spec.kind})"
    partial = " ".join(spec.partial) + kind if spec.partial else ""
    numbers: dict[object, int] = {}
    parts = []
    for worker in mesh.workers:
        box = local_box(spec, shape, worker)
        along = tuple(mesh.coordinate(worker)[mesh.axis_names.index(axis)] for axis in spec.partial)
        number = numbers.setdefault((box, along), len(numbers))
        coordinate = " ".join(f"{axis}={at}" for axis, at in zip(mesh.axis_names, mesh.coordinate(worker), strict=True))
        nbytes = itemsize * math.prod(stop - start for start, stop in box)
        parts.append(HeldPart(worker, coordinate or "-", number, box, nbytes, partial))
    return parts


def describe_held(shape: Shape, spec: ShardingSpec) -> str:
    """The title of a picture of a layout."""
    return f"{'x'.join(map(str, shape)) or 'scalar'} as [{spec}] on mesh {spec.mesh}"


def parts_html(title: str, parts: Sequence[HeldPart]) -> str:
    """A table of parts, for notebooks."""
    return html_table(title, COLUMNS, [part.cells() for part in parts], [part.colour for part in parts])
