"""Writing elements by index: scatter, index_add, index_copy, put and others.

If the indexed dim is cut, each worker applies the updates of its own elements. If the updates are cut, the results are
partial; an op that overwrites needs all updates, since the last one counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gt.sharding.factors import REDUCE, WHOLE, Dim, FactorRef, OpShardingRule, PartialPassthrough, RuleBuilder, Window
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_factors, wrap_dim
from gt.sharding.rules.support.indices import IndexedDim, lower_scatter

_KINDS = {"add": "sum", "sum": "sum", "multiply": "prod", "prod": "prod", "amax": "max", "amin": "min"}
_BOOL_KINDS = {"sum": "or", "prod": "and", "max": "or", "min": "and"}

ReductionOf = Callable[[OpCall], str | None]
"""The reduction by which a call combines updates with existing elements; None if it overwrites them."""


def _overwrites(call: OpCall) -> str | None:
    name = call.kwargs.get("reduce")
    return _KINDS[name] if isinstance(name, str) else None


def _adds(call: OpCall) -> str | None:
    return "sum"


def _reduces(call: OpCall) -> str | None:
    """None for a mean, and without the existing element: all updates of an element are then needed at once."""
    return _KINDS.get(call.arg(4, "reduce")) if call.kwargs.get("include_self", True) else None


def _update_factor(builder: RuleBuilder, call: OpCall, name: str, size: int, kind: str | None) -> Dim:
    """A dim of the updates."""
    if kind is None:
        return (FactorRef(builder.factor(name, size, WHOLE)),)
    return (FactorRef(builder.factor(name, size, REDUCE, _reduction(call, kind))),)


def _reduction(call: OpCall, kind: str) -> str:
    return _BOOL_KINDS[kind] if call.inputs[0].dtype == "bool" else kind


def _passes(call: OpCall, updates: int | None, kind: str | None) -> list[PartialPassthrough]:
    if kind is None or updates is None:
        return []
    reduction = _reduction(call, kind)
    return [PartialPassthrough(frozenset({0, updates}), reduction, reduction)]


def scatter(reduction_of: ReductionOf) -> OpEntry:
    """An op with an index for each updated element. Along the dims that are not indexed, only as many elements are used
    as the index has."""

    def rule(call: OpCall) -> OpShardingRule | None:
        shape, own = call.shapes[:2]
        if not shape or len(own) != len(shape):
            return None
        dim, kind, updates = wrap_dim(call.arg(1, "dim"), len(shape)), reduction_of(call), call.tensor(3, "src")
        builder = RuleBuilder()
        table = dim_factors(builder, shape)
        builder.operands.append(tuple(table))
        update_dims = list(table)
        update_dims[dim] = _update_factor(builder, call, "k", own[dim], kind)
        for given in call.shapes[1:]:
            sizes = zip(update_dims, given, own, strict=True)
            builder.operands.append(tuple([_first(builder, dim, size, used) for dim, size, used in sizes]))
        builder.results.append(tuple(table))
        return builder.build(_passes(call, updates, kind), lambda shard: lower_scatter(shard, [IndexedDim(dim, 1)]))

    return OpEntry(rule)


def _first(builder: RuleBuilder, dim: Dim, size: int, used: int) -> Dim:
    """A dim of which the first `used` elements correspond to the elements of a factor."""
    (ref,) = dim
    return dim if builder.factors[ref.factor].size == size == used else (FactorRef(ref.factor, Window(0, used)),)


def index_put_rows(reduction_of: ReductionOf, *, wraps: bool = False) -> OpEntry:
    """An op with an index for each row of the updates."""

    def rule(call: OpCall) -> OpShardingRule | None:
        shape, own = call.shapes[:2]
        if not shape or len(own) != 1 or any(len(given) not in (0, len(shape)) for given in call.shapes[2:]):
            return None
        dim, kind = wrap_dim(call.arg(1, "dim"), len(shape)), reduction_of(call)
        builder = RuleBuilder()
        table = dim_factors(builder, shape)
        row = _update_factor(builder, call, "k", own[0], kind)
        source = (*table[:dim], row, *table[dim + 1 :])
        builder.operands.extend([tuple(table), (row,), *[source if given else () for given in call.shapes[2:]]])
        builder.results.append(tuple(table))
        indexed = [IndexedDim(dim, 1, wraps)]
        return builder.build(_passes(call, call.tensor(3, "source"), kind), lambda shard: lower_scatter(shard, indexed))

    return OpEntry(rule)


_reduce_rows = index_put_rows(_reduces).rule


def _index_reduce(call: OpCall) -> OpShardingRule | None:
    """No rule for products of 16-bit floats: torch refuses slices of one element, which a shard may have."""
    narrow = call.inputs[0].dtype in ("float16", "bfloat16")
    return None if narrow and call.arg(4, "reduce") == "prod" else _reduce_rows(call)


def _put(call: OpCall) -> OpShardingRule:
    """Indices into the flat tensor: an interval of its first dim is an interval of indices."""
    shape, own, source = call.shapes
    kind = "sum" if call.arg(3, "accumulate", False) else None
    builder = RuleBuilder()
    unit = math.prod(shape[1:])
    table: list[Dim] = [()] * len(shape)
    if shape and unit:
        table[0] = (FactorRef(builder.factor("v", shape[0])),)
    index: tuple[Dim, ...] = ((),) * len(own)
    if own == source:
        index = tuple([_update_factor(builder, call, f"i{dim}", n, kind) for dim, n in enumerate(own)])
    builder.operands.extend([tuple(table), index, index if own == source else ((),) * len(source)])
    builder.results.append(tuple(table))
    indexed = [IndexedDim(0, 1, wraps=True, unit=unit)] if table and table[0] else []
    return builder.build(_passes(call, 2, kind), lambda shard: lower_scatter(shard, indexed))


SCATTER: dict[str, OpEntry] = {
    "aten.scatter": scatter(_overwrites),
    "aten.scatter_add": scatter(_adds),
    "aten.scatter_reduce": scatter(_reduces),
    "aten.index_add": index_put_rows(_adds),
    "aten.index_copy": index_put_rows(_overwrites),
    "aten.index_fill": index_put_rows(_overwrites, wraps=True),
    "aten.index_reduce": OpEntry(_index_reduce),
    "aten.put": OpEntry(_put),
}
