"""Layouts of tensors: `gt.mesh`, the layout of a tensor, and the part of it that each worker holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gt.client import active_session
from gt.client.storage import TensorRef
from gt.client.tracebacks import ends_on_users_line
from gt.core.errors import LayoutError
from gt.sharding.boxes import Shape, box_elements, box_shape
from gt.sharding.spec import DeviceMesh, ShardingSpec, local_box


class LocalShard(NamedTuple):
    """The part of a tensor that one worker holds."""

    slice: tuple[slice, ...]
    shape: Shape
    bytes: int


@ends_on_users_line
def mesh(
    shape: int | Sequence[int], axis_names: Sequence[str] = (), workers: Sequence[int] = (), name: str = ""
) -> DeviceMesh:
    """A grid of workers: `gt.mesh((2, 4), ("dp", "tp"))`. Without `workers` it takes the first connected ones."""
    sizes = _mesh_sizes(shape)
    connected = [info.worker for info in active_session.current().workers]
    count = math.prod(sizes)
    chosen = list(workers) or connected[: max(count, 0)]
    missing = [worker for worker in chosen if worker not in connected]
    if missing or (not workers and len(connected) < count):
        asked = f"workers {missing}" if missing else f"{count} workers"
        enough = max([count, *[worker + 1 for worker in missing]])
        raise LayoutError(
            f"a mesh of shape {tuple(sizes)} needs {asked}, and there are {connected}; "
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


def read_layout(ref: TensorRef) -> ShardingSpec:
    """The layout of a tensor, which the dispatcher is asked for."""
    return ref.session.locate(ref)


def read_shards(ref: TensorRef) -> dict[int, LocalShard]:
    """The part of a tensor that each worker holds."""
    spec, geometry = read_layout(ref), ref.geometry
    held = {worker: local_box(spec, tuple(geometry.shape), worker) for worker in spec.mesh.workers}
    return {
        worker: LocalShard(
            tuple(slice(*interval) for interval in box), box_shape(box), box_elements(box) * geometry.dtype.itemsize
        )
        for worker, box in held.items()
    }
