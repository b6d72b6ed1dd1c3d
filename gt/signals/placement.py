"""From a configuration and the workers that are there to what the dispatcher is told."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gt.core.errors import SignalError
from gt.core.signatures import PolicyRecord
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec
from gt.signals.config import REST, Dims, ShardConfig
from gt.signals.policy import align_dims

ROW = "w"  # the axis of a mesh that is a row of workers


def policy_of(shard: ShardConfig, there: Sequence[int], what: str) -> PolicyRecord:
    """What a placement means with the workers that are there. `what` it is of, for people."""
    mesh = mesh_for(shard.mesh, shard.workers, there, what).record()
    if shard.replicate:
        return PolicyRecord(mesh, closed=True)
    if shard.axis is not None:
        before_or_after = ((),) * (shard.axis if shard.axis >= 0 else -1 - shard.axis)
        return (
            PolicyRecord(mesh, lead=(*before_or_after, (ROW,)))
            if shard.axis >= 0
            else PolicyRecord(mesh, tail=((ROW,), *before_or_after))
        )
    return PolicyRecord(mesh, *_ends(shard.dims or ()))


def mesh_for(
    axes: Sequence[tuple[str, int]] | None, workers: Sequence[int] | None, there: Sequence[int], what: str
) -> DeviceMesh:
    """The mesh that a configuration names: a row of all workers if it names none."""
    sizes = [size for _, size in axes] if axes else [len(workers or there)]
    count = math.prod(sizes)
    chosen = list(workers) if workers is not None else list(there[:count])
    missing = [worker for worker in chosen if worker not in there]
    if missing or len(chosen) < count:
        wanted = max([count, *[worker + 1 for worker in chosen]])
        needed = chosen if missing else f"0 to {count - 1}"
        raise SignalError(
            f"{what} needs workers {needed}, and there are {list(there)}; start more with GT_WORKERS={wanted} or "
            f"gt.init(workers={wanted})"
        )
    return DeviceMesh(sizes, [name for name, _ in axes] if axes else [ROW], chosen)


def _ends(dims: Dims) -> tuple[tuple[DimSpec, ...], tuple[DimSpec, ...]]:
    """The dims before and after those that are passed over."""
    if REST not in dims:
        return _axes(dims), ()
    position = dims.index(REST)
    return _axes(dims[:position]), _axes(dims[position + 1 :])


def _axes(dims: Dims) -> tuple[DimSpec, ...]:
    return tuple([dim for dim in dims if not isinstance(dim, str)])


def spec_for(dims: Dims, mesh: DeviceMesh, rank: int) -> ShardingSpec:
    """The layout of a tensor of some rank that a configuration names."""
    return ShardingSpec(mesh, align_dims(*_ends(dims), rank))
