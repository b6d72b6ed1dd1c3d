"""The bytes that each worker sends to each other one in a step of a reshard."""

from __future__ import annotations

import math
from collections import Counter

from gt.sharding.boxes import Shape, balanced_cuts, box_elements
from gt.sharding.reshard import ReshardStep, exchange_group, pulls
from gt.sharding.spec import compute_local_shape


def bytes_by_pair(step: ReshardStep, shape: Shape, itemsize: int) -> Counter[tuple[int, int]]:
    """Bytes by (sender, receiver)."""
    found: Counter[tuple[int, int]] = Counter()
    for worker in step.target.mesh.workers:
        received = _reduced_with(step, shape, worker) if step.kind == "all-reduce" else _pulled(step, shape, worker)
        for peer, elements in received.items():
            if peer != worker and elements:
                found[peer, worker] += elements * itemsize
    return found


def _pulled(step: ReshardStep, shape: Shape, worker: int) -> dict[int, int]:
    return {peer: box_elements(box) for peer, box in pulls(step, shape, worker)}


def _reduced_with(step: ReshardStep, shape: Shape, worker: int) -> dict[int, int]:
    """Of each member of a group, its addend of the slice that this worker reduces, and the slice that it reduced."""
    members = exchange_group(step, worker)
    elements = math.prod(compute_local_shape(step.source, shape, worker))
    lengths = [stop - start for start, stop in balanced_cuts(elements, (len(members),))]
    own = lengths[members.index(worker)]
    return {member: own + length for member, length in zip(members, lengths, strict=True)}
