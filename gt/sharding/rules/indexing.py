"""Picking elements by index: index_select, gather, take. If the indexed dim is cut, each worker picks the elements that
it holds and gives zeros for the others; the results are summed."""

from __future__ import annotations

import math

from gt.sharding.factors import (
    MASK,
    Dim,
    FactorRef,
    OpShardingRule,
    RuleBuilder,
    Window,
)
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_factors, wrap_dim
from gt.sharding.rules.support.element_moves import all_partial_kinds, merge_kind
from gt.sharding.rules.support.indices import IndexedDim, lower_gather


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
