"""Advanced indexing: several dims indexed by tensors that are broadcast together."""

from __future__ import annotations

from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.factors import MASK, PASS, REDUCE, WHOLE, Dim, OpShardingRule, PartialPassthrough, Ref, RuleBuilder
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.support.element_moves import every_kind, own_dims, sum_kind
from gt.sharding.rules.support.indices import Indexed, pick, put
from gt.sharding.spec import Shape


class _Advanced(NamedTuple):
    """The dims of the tensor, of the indices and of what they pick: the dims of the broadcast indices are where the
    indexed ones were, or first if these are not side by side. `trailing` dims come after them."""

    table: tuple[Dim, ...]
    indices: list[tuple[Dim, ...]]
    picked: tuple[Dim, ...]
    indexed: list[Indexed]
    trailing: int


def _advanced(builder: RuleBuilder, call: OpCall, kind: str) -> _Advanced | None:
    """`kind` is the class of the dims of the indices. None where an index is a mask: the shape depends on it."""
    indices = call.arg(1, "indices")
    indexed = [Indexed(dim, value.index, wraps=True) for dim, value in enumerate(indices) if isinstance(value, Input)]
    metas = [call.inputs[one.by] for one in indexed]
    if not metas or len({one.by for one in indexed}) < len(indexed):
        return None
    if any(meta.dtype in ("bool", "uint8") for meta in metas):
        return None
    table = own_dims(builder, call.shapes[0])
    sizes = _broadcast([meta.shape for meta in metas])
    reduction = sum_kind(call.inputs[0].dtype)
    broadcast: list[Dim] = [(Ref(builder.factor(f"b{dim}", size, kind, reduction)),) for dim, size in enumerate(sizes)]
    places = [one.dim for one in indexed]
    side_by_side = places == list(range(places[0], places[-1] + 1))
    first = places[0] if side_by_side else 0
    rest = [dim for place, dim in enumerate(table) if place not in places]
    return _Advanced(
        tuple(table),
        [aligned(builder, meta.shape, broadcast) for meta in metas],
        (*rest[:first], *broadcast, *rest[first:]),
        indexed,
        len(rest) - first,
    )


def _broadcast(shapes: list[Shape]) -> Shape:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple([next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)])


def aligned(builder: RuleBuilder, shape: Shape, dims: list[Dim] | tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The dims of a tensor that is broadcast to one of the given dims."""
    last = [*[()] * len(shape), *dims][len(dims) :]
    return tuple(
        [
            dim if dim and builder.factors[dim[0].factor].size == size else ()
            for size, dim in zip(shape, last, strict=True)
        ]
    )


def index(call: OpCall) -> OpShardingRule | None:
    builder = RuleBuilder()
    found = _advanced(builder, call, PASS)
    if found is None:
        return None
    for one in found.indexed:
        builder.factor(f"d{one.dim}", call.shapes[0][one.dim], MASK, sum_kind(call.inputs[0].dtype))
    builder.operands.extend([found.table, *found.indices])
    builder.results.append(found.picked)
    return builder.build(every_kind(call, 0), lambda shard: pick(shard, found.indexed, found.trailing))


def index_put(call: OpCall) -> OpShardingRule | None:
    """Updates may be cut where they are added; where they overwrite, the last one counts."""
    accumulates = call.arg(3, "accumulate", False)
    builder = RuleBuilder()
    found = _advanced(builder, call, REDUCE if accumulates else WHOLE)
    values = call.tensor(2, "values")
    if found is None or values is None:
        return None
    operands = {0: found.table, values: aligned(builder, call.shapes[values], found.picked)}
    operands |= {one.by: dims for one, dims in zip(found.indexed, found.indices, strict=True)}
    builder.operands.extend([operands[place] for place in range(len(call.inputs))])
    builder.results.append(found.table)
    kind = sum_kind(call.inputs[0].dtype)
    passes = [PartialPassthrough(frozenset({0, values}), kind, kind)] if accumulates else []
    return builder.build(passes, lambda shard: put(shard, found.indexed))
