"""Resolves a configuration with the connected workers: meshes, policies for the dispatcher, and specs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gt.core.errors import SignalError
from gt.core.signatures import PolicyRecord
from gt.sharding.host_order import default_mesh, mesh_of_workers
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec, mesh_of, whole
from gt.signals.checks import ALL, misspelt_of
from gt.signals.config import REST, AxesPerDim, Config, ModelConfig, ShardConfig, Workers, at
from gt.signals.policy import align_dims

ROW = "w"  # the axis of a mesh that is a row of workers


def resolve_policy(shard: ShardConfig, connected: Mapping[int, str], subject: str) -> PolicyRecord:
    """The policy of a signal. `connected` are the hosts of the connected workers. `subject` names the signal in
    errors."""
    mesh = resolve_mesh(shard.mesh, shard.workers, connected, subject).record()
    if shard.replicate:
        return PolicyRecord(mesh, closed=True)
    if shard.axis is not None:
        uncut = ((),) * (shard.axis if shard.axis >= 0 else -1 - shard.axis)
        return (
            PolicyRecord(mesh, lead=(*uncut, (ROW,)))
            if shard.axis >= 0
            else PolicyRecord(mesh, tail=((ROW,), *uncut))
        )  # fmt: skip
    return PolicyRecord(mesh, *_split_at_rest(shard.dims or ()))


def resolve_mesh(
    axes: Sequence[tuple[str, int]] | None, workers: Workers, connected: Mapping[int, str], subject: str
) -> DeviceMesh:
    """The mesh that a configuration names; a row of all workers if it names none. `connected` are the hosts of the
    connected workers."""
    named = workers if isinstance(workers, tuple) else None
    sizes = [size for _, size in axes] if axes else [len(named or connected)]
    if workers == ALL:
        sizes[0] = max(1, len(connected) // math.prod(sizes[1:]))
    count = math.prod(sizes)
    chosen = list(named) if named is not None else list(connected)[:count]
    missing = [worker for worker in chosen if worker not in connected]
    if missing or len(chosen) < count:
        wanted = max([count, *[worker + 1 for worker in chosen]])
        needed = chosen if missing else f"0 to {count - 1}"
        raise SignalError(
            f"{subject} needs workers {needed}, and there are {list(connected)}; "
            f"start more with GT_WORKERS={wanted} or gt.init(workers={wanted})"
        )
    names = [name for name, _ in axes] if axes else [ROW]
    if named is None:
        return default_mesh(sizes, names, connected)
    return mesh_of_workers(sizes, names, chosen, connected)


def sections_with_workers(config: Config) -> Iterator[tuple[str, ShardConfig | ModelConfig]]:
    """The parts of a configuration that name workers or a mesh, each with its name for errors."""
    for name, signal in config.signals.items():
        if signal.shard is not None:
            yield f"{at(signal.source)}signal {name!r}", signal.shard
    if config.model is not None:
        yield f"{at(config.model.source)}model", config.model


def readings_without(config: Config, connected: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """The parts of a configuration that need more workers than are connected, and how they read for these."""
    for subject, section in sections_with_workers(config):
        try:
            resolve_mesh(section.mesh, section.workers, connected, subject)
        except SignalError:
            yield subject, _reading(section, list(connected))


def _reading(section: ShardConfig | ModelConfig, connected: Sequence[int]) -> str:
    """The mesh and the workers of a section, for fewer workers: the first axes of the mesh are shortened."""
    named = section.workers if isinstance(section.workers, tuple) else ()
    left = [worker for worker in named if worker in connected] or connected
    if section.mesh is None:
        return f"workers: {left}"
    sizes = [size for _, size in section.mesh]
    for position, size in enumerate(sizes):
        sizes[position] = max(1, min(size, len(left) * size // math.prod(sizes)))
    mesh = ", ".join(f"{name}: {size}" for (name, _), size in zip(section.mesh, sizes, strict=True))
    return f"mesh: {{{mesh}}}" + (f", workers: {left[: math.prod(sizes)]}" if named else "")


def resolve_whole(shard: ShardConfig, connected: Mapping[int, str], subject: str, rank: int) -> ShardingSpec | None:
    """The layout of parameters of modules that run in the scope of a signal: whole on each of its workers, if it cuts
    nothing but batches (dim 0). None if it cuts other dims: then their first use decides."""
    policy = resolve_policy(shard, connected, subject)
    return whole(mesh_of(policy.mesh), rank) if len(policy.lead) <= 1 and not policy.tail else None


def resolve_spec(dims: AxesPerDim, mesh: DeviceMesh, rank: int) -> ShardingSpec:
    """The layout that a configuration gives a tensor of some rank."""
    return ShardingSpec(mesh, align_dims(*_split_at_rest(dims), rank))


def resolve_activation(dims: AxesPerDim, mesh: DeviceMesh, shape: Sequence[int]) -> ShardingSpec | None:
    """The layout that a configuration gives an input of a model or the result of a module; None if it is a layout for
    tensors of another rank: without `...` it is for those with as many dims as it names. A dim with fewer elements than
    shards is not cut."""
    named = len([dim for dim in dims if dim != REST])
    if not shape or named > len(shape) or (REST not in dims and named < len(shape)):
        return None
    wanted = resolve_spec(dims, mesh, len(shape)).dims
    sizes = [math.prod([mesh.axis_size(axis) for axis in axes]) for axes in wanted]
    return ShardingSpec(mesh, [axes if n <= size else () for axes, n, size in zip(wanted, sizes, shape, strict=True)])


def _split_at_rest(dims: AxesPerDim) -> tuple[tuple[DimSpec, ...], tuple[DimSpec, ...]]:
    """The axes of the dims before and after `...`."""
    if REST not in dims:
        return _axes(dims), ()
    position = dims.index(REST)
    return _axes(dims[:position]), _axes(dims[position + 1 :])


def _axes(dims: AxesPerDim) -> tuple[DimSpec, ...]:
    return tuple([dim for dim in dims if not isinstance(dim, str)])


def unknown_backward(backward: str, known: Iterable[str]) -> str:
    """The warning of a backward signal that has no configuration."""
    close = misspelt_of(backward, known)
    hint = f"did you mean {close!r}?" if close else "register it to lay gradients out"
    return f"backward names signal {backward!r}, which is not configured and changes nothing; {hint}"


def cycle_text(cycle: Iterable[str]) -> str:
    return f"backward goes in a circle: {' -> '.join(cycle)}; remove one of these backward entries"


def backward_chain(name: str, following: Callable[[str], str | None]) -> tuple[str, ...]:
    """A signal, its backward signal, and so on. The last one has no backward signal, or closes a cycle."""
    chain = {name: None}
    while after := following(name):
        if after in chain:
            return (*chain, after)
        chain[after] = None
        name = after
    return tuple(chain)


def backward_cycles(following: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Every cycle once, from the first of its signals in the mapping and back to it."""
    cycles: list[tuple[str, ...]] = []
    done: set[str] = set()
    for start in following:
        path: dict[str, None] = {}
        name = start
        while name and name not in done and name not in path:
            path[name] = None
            name = following.get(name, "")
        if name in path:
            members = list(path)
            cycles.append((*members[members.index(name) :], name))
        done.update(path)
    return cycles
