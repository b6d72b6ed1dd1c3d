"""Picking elements by index: index_select, gather, take, and `x[i, :, j]`.

If the indexed dim is cut, each worker picks the elements that it holds and gives zeros for the others; the results are
summed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.boxes import Shape
from gt.sharding.factors import (
    MASK,
    PASS,
    REDUCE,
    WHOLE,
    Dim,
    FactorRef,
    OpShardingRule,
    PartialPassthrough,
    RuleBuilder,
    Window,
)
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_factors, wrap_dim
from gt.sharding.rules.support.element_moves import all_partial_kinds, merge_kind
from gt.sharding.rules.support.indices import IndexedDim, lower_gather, lower_scatter


def _index_select(call: OpCall) -> OpShardingRule | None:
    shape, own = call.shapes
    if not shape:
        return None
    dim = wrap_dim(call.arg(1, "dim"), len(shape))
    builder = RuleBuilder()
    dims = dim_factors(builder, shape)
    builder.factor(f"d{dim}", shape[dim], MASK, merge_kind(call.inputs[0].dtype))
    index: tuple[Dim, ...] = ((FactorRef(builder.factor("i", own[0])),),) if own else ()
    builder.operands.extend([tuple(dims), index])
    builder.results.append((*dims[:dim], *(index or ((),)), *dims[dim + 1 :]))
    trailing = len(shape) - dim - len(index)
    return builder.build(all_partial_kinds(call, 0), lambda shard: lower_gather(shard, [IndexedDim(dim, 1)], trailing))


def _gather(call: OpCall) -> OpShardingRule | None:
    """Along the dims that are not indexed, only as many elements of the tensor are used as the index has."""
    shape, own = call.shapes
    if not shape or len(own) != len(shape):
        return None
    dim = wrap_dim(call.arg(1, "dim"), len(shape))
    builder = RuleBuilder()
    index = dim_factors(builder, own)
    table = [
        refs if size == used else (FactorRef(refs[0].factor, Window(0, used)),)
        for refs, size, used in zip(index, shape, own, strict=True)
    ]
    table[dim] = (FactorRef(builder.factor("v", shape[dim], MASK, merge_kind(call.inputs[0].dtype))),)
    builder.operands.extend([tuple(table), tuple(index)])
    builder.results.append(tuple(index))
    return builder.build(all_partial_kinds(call, 0), lambda shard: lower_gather(shard, [IndexedDim(dim, 1)]))


def _take(call: OpCall) -> OpShardingRule:
    """Indices into the flat tensor: an interval of its first dim is an interval of indices."""
    shape, own = call.shapes
    builder = RuleBuilder()
    index = tuple(dim_factors(builder, own))
    unit = math.prod(shape[1:])
    table: list[Dim] = [()] * len(shape)
    if shape and unit:
        table[0] = (FactorRef(builder.factor("v", shape[0], MASK, merge_kind(call.inputs[0].dtype))),)
    builder.operands.extend([tuple(table), index])
    builder.results.append(index)
    indexed = [IndexedDim(0, 1, wraps=True, unit=unit)] if table and table[0] else []
    return builder.build(all_partial_kinds(call, 0), lambda shard: lower_gather(shard, indexed))


INDEXING: dict[str, OpEntry] = {
    "aten.index_select": OpEntry(_index_select),
    "aten.gather": OpEntry(_gather),
    "aten.take": OpEntry(_take),
}


class _AdvancedIndexing(NamedTuple):
    """The dims of the indexed tensor, of the indices and of the result (`picked`). In the result, the dims of the
    broadcast indices replace the indexed ones, or come first if these are not adjacent; `trailing` dims follow."""

    tensor_dims: tuple[Dim, ...]
    indices: list[tuple[Dim, ...]]
    picked: tuple[Dim, ...]
    indexed: list[IndexedDim]
    trailing: int


def _advanced_indexing(builder: RuleBuilder, call: OpCall, role: str) -> _AdvancedIndexing | None:
    """The dims of a call. `role` is that of the factors of the index dims. None if an index is a mask, since the shape
    of the result then depends on values."""
    indices = call.arg(1, "indices")
    indexed = [
        IndexedDim(dim, value.index, wraps=True) for dim, value in enumerate(indices) if isinstance(value, Input)
    ]
    metas = [call.inputs[indexed_dim.index_input] for indexed_dim in indexed]
    if not metas or len({indexed_dim.index_input for indexed_dim in indexed}) < len(indexed):
        return None
    if any(meta.dtype in ("bool", "uint8") for meta in metas):
        return None
    tensor_dims = dim_factors(builder, call.shapes[0])
    sizes = _broadcast([meta.shape for meta in metas])
    reduction = merge_kind(call.inputs[0].dtype)
    broadcast: list[Dim] = [
        (FactorRef(builder.factor(f"b{dim}", size, role, reduction)),) for dim, size in enumerate(sizes)
    ]
    positions = [indexed_dim.dim for indexed_dim in indexed]
    side_by_side = positions == list(range(positions[0], positions[-1] + 1))
    first = positions[0] if side_by_side else 0
    rest = [dim for position, dim in enumerate(tensor_dims) if position not in positions]
    return _AdvancedIndexing(
        tuple(tensor_dims),
        [broadcast_dims(builder, meta.shape, broadcast) for meta in metas],
        (*rest[:first], *broadcast, *rest[first:]),
        indexed,
        len(rest) - first,
    )


def _broadcast(shapes: list[Shape]) -> Shape:
    rank = max(map(len, shapes))
    pad_tensor = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple([next((size for size in sizes if size != 1), 1) for sizes in zip(*pad_tensor, strict=True)])


def broadcast_dims(builder: RuleBuilder, shape: Shape, dims: list[Dim] | tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The dims of a tensor that is broadcast to a tensor of the given dims."""
    last = [*[()] * len(shape), *dims][len(dims) :]
    return tuple(
        [
            dim if dim and builder.factors[dim[0].factor].size == size else ()
            for size, dim in zip(shape, last, strict=True)
        ]
    )


def _index(call: OpCall) -> OpShardingRule | None:
    builder = RuleBuilder()
    found = _advanced_indexing(builder, call, PASS)
    if found is None:
        return None
    for indexed_dim in found.indexed:
        builder.factor(f"d{indexed_dim.dim}", call.shapes[0][indexed_dim.dim], MASK, merge_kind(call.inputs[0].dtype))
    builder.operands.extend([found.tensor_dims, *found.indices])
    builder.results.append(found.picked)
    return builder.build(all_partial_kinds(call, 0), lambda shard: lower_gather(shard, found.indexed, found.trailing))


def _index_put(call: OpCall) -> OpShardingRule | None:
    """Updates may be cut only if they are added: if they overwrite, the last one counts."""
    accumulates = call.arg(3, "accumulate", False)
    builder = RuleBuilder()
    found = _advanced_indexing(builder, call, REDUCE if accumulates else WHOLE)
    values = call.tensor(2, "values")
    if found is None or values is None:
        return None
    operands = {0: found.tensor_dims, values: broadcast_dims(builder, call.shapes[values], found.picked)}
    operands |= {indexed_dim.index_input: dims for indexed_dim, dims in zip(found.indexed, found.indices, strict=True)}
    builder.operands.extend([operands[position] for position in range(len(call.inputs))])
    builder.results.append(found.tensor_dims)
    kind = merge_kind(call.inputs[0].dtype)
    passthroughs = [PartialPassthrough(frozenset({0, values}), kind, kind)] if accumulates else []
    return builder.build(passthroughs, lambda shard: lower_scatter(shard, found.indexed))


ADVANCED_INDEXING: dict[str, OpEntry] = {
    "aten.index": OpEntry(_index),
    "aten._unsafe_index": OpEntry(_index),
    "aten.index_put": OpEntry(_index_put),
    "aten._index_put_impl": OpEntry(_index_put),
    "aten._unsafe_index_put": OpEntry(_index_put),
}
