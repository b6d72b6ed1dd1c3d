"""The distinct parts of a tensor in a layout: a client uploads each of them once, and reads each to get the value.

Client and dispatcher derive the same parts in the same order from the layout, so their messages need not describe them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from gt.sharding.boxes import Box, Shape, box_elements
from gt.sharding.hop_traffic import shard_indices, worker_boxes
from gt.sharding.spec import ShardingSpec


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
