"""Where tensors lie: meshes of the workers that are there, and what each of them holds of a tensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gt.client import session as sessions
from gt.client.storage import TensorRef
from gt.client.tracebacks import ends_on_users_line
from gt.core.errors import LayoutError
from gt.sharding.boxes import Shape, box_elements, box_shape
from gt.sharding.spec import DeviceMesh, ShardingSpec, local_box


class LocalShard(NamedTuple):
    """What one worker holds of a tensor: which part, its shape, and its bytes."""

    slice: tuple[slice, ...]
    shape: Shape
    bytes: int


@ends_on_users_line
def mesh(
    shape: int | Sequence[int], axis_names: Sequence[str] = (), workers: Sequence[int] = (), name: str = ""
) -> DeviceMesh:
    """A grid of workers: `gt.mesh((2, 4), ("dp", "tp"))`. Without `workers` it takes the first ones that are there."""
    sizes = _mesh_sizes(shape)
    there = [info.worker for info in sessions.current().workers]
    count = math.prod(sizes)
    chosen = list(workers) or there[: max(count, 0)]
    missing = [worker for worker in chosen if worker not in there]
    if missing or (not workers and len(there) < count):
        asked = f"workers {missing}" if missing else f"{count} workers"
        enough = max([count, *[worker + 1 for worker in missing]])
        raise LayoutError(
            f"a mesh of shape {tuple(sizes)} needs {asked}, and there are {there}; "
            f"start more with gt.init(workers={enough}) or GT_WORKERS={enough}"
        )
    return DeviceMesh(sizes, axis_names, chosen, name)


def _mesh_sizes(shape: Any) -> list[int]:
    try:
        return [operator.index(size) for size in (shape if isinstance(shape, Iterable) else [shape])]
    except TypeError:
        raise LayoutError(
            f"a mesh has a whole number of workers along each axis; its shape cannot be {shape!r}: say it as in "
            f"gt.mesh(2) or gt.mesh((2, 4), ('dp', 'tp'))"
        ) from None


def spec_of_ref(ref: TensorRef) -> ShardingSpec:
    """How a tensor is laid out; asks the dispatcher."""
    return ref.session.locate(ref)


def shards_of_ref(ref: TensorRef) -> dict[int, LocalShard]:
    """By worker, what it holds."""
    spec, geometry = spec_of_ref(ref), ref.geometry
    held = {worker: local_box(spec, tuple(geometry.shape), worker) for worker in spec.mesh.workers}
    return {
        worker: LocalShard(
            tuple([slice(*interval) for interval in box]), box_shape(box), box_elements(box) * geometry.dtype.itemsize
        )
        for worker, box in held.items()
    }
