"""Writing elements by index: scatter, index_add, index_copy, put and others; and by a mask: masked_scatter.

If the indexed dim is cut, each worker applies the updates of its own elements. If the updates are cut, the results are
partial; an op that overwrites needs all updates, since the last one counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gt.core.signatures import DType, Input, ListArg, MemoryFormat
from gt.sharding.boxes import Box, Shape, box_elements
from gt.sharding.factors import (
    REDUCE,
    WHOLE,
    Dim,
    FactorRef,
    OpShardingRule,
    PartialPassthrough,
    RuleBuilder,
    Window,
    bind,
)
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_factors, dim_names, rule_text, wrap_dim
from gt.sharding.rules.support.indices import IndexedDim, lower_scatter
from gt.sharding.rules.support.local_programs import zeros

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


def _part(builder: LocalBuilder, value: Input, whole: Shape, box: Box) -> Input:
    for dim, (start, stop) in enumerate(box):
        if (start, stop) != (0, whole[dim]):
            value = builder.call("aten.slice.Tensor", value, dim, start, stop)
    return value


def _marked(builder: LocalBuilder, mask: Input, shape: Shape, box: Box) -> tuple[Input, Input]:
    """The box of a mask expanded to a shape, and for each of its elements the number of true elements before it in the
    flat mask."""
    mask = builder.call("aten.expand.default", mask, ListArg(shape))
    dense = builder.call("aten.clone.default", mask, memory_format=MemoryFormat("contiguous_format"))
    flat = builder.call("aten.view.default", dense, ListArg((math.prod(shape),)))
    count = builder.call("aten.cumsum.default", flat, 0, dtype=DType("int64"))
    before = builder.call("aten.clamp_min.default", builder.call("aten.sub.Scalar", count, 1), 0)
    before = builder.call("aten.view.default", before, ListArg(shape))
    return _part(builder, mask, shape, box), _part(builder, before, shape, box)


def _masked_scatter(call: OpCall) -> OpShardingRule | None:
    """Each element of the result takes its element of the source, which is whole."""
    if len(call.inputs) != 3 or call.inputs[2].elements == 0:
        return None
    names = dim_names(len(call.result_shapes[0]))
    own = names[len(names) - len(call.shapes[0]) :]
    operands = [own, ["1"] * len(call.shapes[1]), ["1"] * len(call.shapes[2])]
    return bind(rule_text(operands, [names], {}), call.shapes, call.result_shapes, lowering=_lower_scatter)


def _lower_scatter(shard: LocalContext) -> LocalProgram:
    builder = LocalBuilder(3)
    mask, before = _marked(builder, Input(1), shard.call.outputs[0].shape, shard.result_box())
    taken = builder.call("aten.take.default", Input(2), before)
    return builder.finish(builder.call("aten.where.self", mask, taken, Input(0)))


def _masked_scatter_backward(call: OpCall) -> OpShardingRule | None:
    """Gradients are added to the elements of the source that were taken."""
    if len(call.inputs) != 2:
        return None
    names = dim_names(len(call.shapes[0]))
    operands, results = [names, ["1"] * len(call.shapes[1])], [["1"] * len(call.result_shapes[0])]
    text = rule_text(operands, results, {"reduce(sum)": names})
    passthroughs = [PartialPassthrough(frozenset({0}))]
    return bind(text, call.shapes, call.result_shapes, passthroughs=passthroughs, lowering=_lower_backward)


def _lower_backward(shard: LocalContext) -> LocalProgram:
    builder, box = LocalBuilder(2), shard.operand_box(0)
    (result,) = shard.call.outputs
    none = zeros(builder, result.shape, result.dtype)
    if not result.elements or not box_elements(box):
        return builder.finish(none)
    mask, before = _marked(builder, Input(1), shard.call.inputs[0].shape, box)
    unmasked = builder.call("aten.logical_not.default", mask)
    given = builder.call("aten.masked_fill.Scalar", Input(0), unmasked, 0)
    return builder.finish(builder.call("aten.put.default", none, before, given, True))


MASKED_SCATTER: dict[str, OpEntry] = {
    "aten.masked_scatter": OpEntry(_masked_scatter),
    "aten.masked_scatter_backward": OpEntry(_masked_scatter_backward),
}
