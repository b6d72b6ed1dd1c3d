"""`ppermute` and `axis_index`: parts of a tensor at other places along an axis of a mesh, by the names of JAX."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index, itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from gt.client.creation import arange
from gt.client.layouts import current_mesh
from gt.client.tensor import Tensor, to_gt
from gt.client.torch_dispatch import dispatch
from gt.core.errors import LayoutError
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.placements import Layout, OpRequest, require_mesh
from gt.sharding.spec import DeviceMesh, ShardingSpec

Pairs: TypeAlias = tuple[tuple[int, int], ...]
Interval: TypeAlias = tuple[int, int]


@ends_on_users_line
def ppermute(x: torch.Tensor, axis: str, perm: Iterable[Sequence[int]]) -> Tensor:
    """The tensor with its parts along an axis at other places: for each pair (source, destination) of `perm` the part
    at the first index is at the second one then, and parts that no pair gives are zeros. The layout stays. Each part
    moves once. Gradients pass.

    >>> gt.init(workers=4, mode="virtual")
    >>> x = gt.shard(torch.arange(8), gt.mesh(4, ("x",)))
    >>> gt.distributed.ppermute(x, "x", [(0, 1), (1, 2), (2, 3), (3, 0)]).tolist()
    [6, 7, 0, 1, 2, 3, 4, 5]
    """
    own = to_gt(x)
    spec = own.spec
    pairs = _pairs(spec.mesh, axis, perm)
    dim = next((place for place, axes in enumerate(spec.dims) if axis in axes), None)
    if dim is not None:
        blocks = _blocks(spec, tuple(own.shape), dim, axis)
        return _Permute.apply(own, _Permutation(blocks, dim, pairs, spec))  # type: ignore[no-any-return]
    if len(pairs) == spec.mesh.axis_size(axis):
        return own  # all hold the same, or addends of one sum
    raise LayoutError(
        f"[{spec}] is not cut along {axis!r}: what workers along it hold belongs to one value, of which "
        f"perm={list(pairs)} would make several"
    )


@ends_on_users_line
def axis_index(axis: str, mesh: DeviceMesh | None = None) -> Tensor:
    """The indices along an axis of a mesh, or of the open one, as a tensor that is cut along it: each worker holds its
    own index.

    >>> gt.init(workers=2, mode="virtual")
    >>> index = gt.distributed.axis_index("x", gt.mesh(2, ("x",)))
    >>> index.tolist(), index.shards()[1].data
    ([0, 1], tensor([1]))
    """
    own = require_mesh(mesh or current_mesh())
    return arange(own.axis_size(_known(own, axis)), mesh=own, placements=ShardingSpec(own, [(axis,)]))


def _known(mesh: DeviceMesh, axis: Any) -> str:
    if axis not in mesh.axis_names:
        raise LayoutError(f"mesh {mesh} has no axis {axis!r}; it has {', '.join(mesh.axis_names)}")
    return str(axis)


def _pairs(mesh: DeviceMesh, axis: str, perm: Iterable[Sequence[int]]) -> Pairs:
    size = mesh.axis_size(_known(mesh, axis))
    try:
        pairs = tuple([(index(source), index(target)) for source, target in perm])
    except (TypeError, ValueError):
        raise LayoutError(f"perm={perm!r} is no list of pairs (source, destination) of indices") from None
    for ends in zip(*pairs, strict=True):
        if len(set(ends)) < len(ends) or not all(0 <= index < size for index in ends):
            raise LayoutError(
                f"perm={list(pairs)}: along {axis!r} of mesh {mesh} are the indices 0 to {size - 1}, and each is a "
                f"source once at most, and once a destination"
            )
    return pairs


def _blocks(spec: ShardingSpec, shape: tuple[int, ...], dim: int, axis: str) -> list[list[Interval]]:
    """The intervals of a dim in groups: those of a group differ in the index along the axis only, and are in its
    order."""
    counts, place = spec.counts(dim), spec.dims[dim].index(axis)
    inner = torch.Size(counts[place + 1 :]).numel()
    intervals = spec.intervals(shape, dim)
    firsts = [start for start in range(len(intervals)) if start // inner % counts[place] == 0]
    groups = [[intervals[first + index * inner] for index in range(counts[place])] for first in firsts]
    for group in groups:
        if len({stop - start for start, stop in group}) > 1:
            sizes = [stop - start for start, stop in group]
            raise LayoutError(
                f"the parts of dim {dim} along {axis!r} have the sizes {sizes}: only equal ones change places"
            )
    return groups


class _Permutation(NamedTuple):
    """Blocks of a dim, in groups, and the pairs of places in a group between which they are exchanged."""

    groups: list[list[Interval]]
    dim: int
    pairs: Pairs
    spec: ShardingSpec

    def inverse(self) -> _Permutation:
        return self._replace(pairs=tuple([(target, source) for source, target in self.pairs]))

    def sources(self) -> list[tuple[Interval, Interval | None]]:
        """For each block, in order, the block that comes to its place; neighbours that stay neighbours are one."""
        source_of = {target: source for source, target in self.pairs}
        found: list[tuple[Interval, Interval | None]] = []
        moves = [
            (own, group[source_of[at]] if at in source_of else None)
            for group in self.groups
            for at, own in enumerate(group)
        ]
        for own, source in sorted(moves, key=itemgetter(0)):
            last, came = found[-1] if found else (own, own)
            if found and source is not None and came is not None and came[1] == source[0]:
                found[-1] = (last[0], own[1]), (came[0], source[1])
            else:
                found.append((own, source))
        return found

    def of(self, x: Tensor) -> Tensor:
        """A tensor with its blocks permuted, laid out as the first one was."""
        pieces = []
        for own, source in self.sources():
            start, stop = own if source is None else source
            piece = x.narrow(self.dim, start, stop - start)
            pieces.append(torch.zeros_like(piece) if source is None else piece)
        request = OpRequest(Layout(self.spec.mesh, self.spec))
        return dispatch(Tensor, torch.ops.aten.cat.default, (), (pieces, self.dim), None, request)  # type: ignore[no-any-return, arg-type]


class _Permute(torch.autograd.Function):
    """The autograd function of `ppermute`, also for forward-mode AD: the gradient goes back."""

    @staticmethod
    def forward(x: Tensor, permutation: _Permutation) -> Tensor:
        return permutation.of(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.permutation = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Permute.apply(gradient, ctx.permutation.inverse()), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return _Permute.apply(tangent, ctx.permutation)  # type: ignore[no-any-return]
