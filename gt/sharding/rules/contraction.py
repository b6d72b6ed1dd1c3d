"""Products that sum over a shared factor: matrix products and their kin."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import DType, Input, ListArg, MemoryFormat, WorkerDevice
from gt.sharding.factors import PASS, REDUCE, OpShardingRule, PartialPassthrough, Ref, RuleBuilder, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.local_programs import adds_once, same_op, unless_empty


def each_of(*groups: Sequence[int]) -> tuple[PartialPassthrough, ...]:
    """Sums pass through an op that is linear in each of these groups of operands, the others being whole."""
    return tuple([PartialPassthrough(frozenset(group), growing=True) for group in groups])


def _product(text: str, *passes: PartialPassthrough, lowering: Lowering | None = None) -> OpEntry:
    def rule(call: OpCall) -> OpShardingRule | None:
        if len(call.inputs) != text.partition("->")[0].count(",") + 1:
            return None  # one tensor twice
        return bind(text, call.shapes, call.result_shapes, passes=passes, lowering=lowering)

    return OpEntry(rule)


def _product_added(factors: str, result: str, summed: str) -> OpEntry:
    """beta * bias + alpha * product, where the bias broadcasts to the result. Where the sum is cut, the bias is added
    once; beta = 0 means that it is not even looked at."""

    def rule(call: OpCall) -> OpShardingRule | None:
        if len(call.inputs) != 3:
            return None
        names = result.split()
        bias = " ".join(names[len(names) - len(call.shapes[0]) :])
        text = f"{bias}, {factors} -> {result}" + (f" | reduce(sum): {summed}" if summed else "")
        return bind(text, call.shapes, call.result_shapes, passes=each_of((0, 1), (0, 2)), lowering=lower)

    def lower(shard: LocalContext) -> LocalProgram:
        return same_op(shard) if adds_once(shard) else same_op(shard, beta=0)

    return OpEntry(rule)


def _linear(call: OpCall) -> OpShardingRule | None:
    has_bias = call.tensor(2, "bias") is not None
    passes = each_of((0, 2), (1, 2)) if has_bias else each_of((0,), (1,))
    text = f"... k, o k{', o' if has_bias else ''} -> ... o | reduce(sum): k"
    return bind(text, call.shapes, call.result_shapes, passes=passes, lowering=_lower_linear if has_bias else None)


def _lower_linear(shard: LocalContext) -> LocalProgram:
    return same_op(shard) if adds_once(shard) else same_op(shard, {2: None})


def _trilinear(call: OpCall) -> OpShardingRule | None:
    """A product of three tensors, each of which lacks some dims, of which some are then summed."""
    if len(call.inputs) != 3:
        return None
    summed: Sequence[int] = call.arg(6, "sumdim")
    rank = len(call.shapes[0]) + len(call.arg(3, "expand1"))
    builder = RuleBuilder()
    sizes: dict[int, int] = {}
    present = []
    for place, shape in enumerate(call.shapes):
        absent: Sequence[int] = call.arg(3 + place, f"expand{place + 1}")
        present.append([dim for dim in range(rank) if dim not in absent])
        sizes |= _larger(sizes, dict(zip(present[-1], shape, strict=True)))
    names = [builder.factor(f"d{dim}", sizes[dim], REDUCE if dim in summed else PASS) for dim in range(rank)]
    for dims, shape in zip(present, call.shapes, strict=True):
        pairs = zip(dims, shape, strict=True)
        builder.operands.append(tuple([(Ref(names[dim]),) if size == sizes[dim] else () for dim, size in pairs]))
    builder.results.append(tuple([(Ref(names[dim]),) for dim in range(rank) if dim not in summed]))
    return builder.build(each_of((0,), (1,), (2,)))


def _larger(sizes: dict[int, int], own: dict[int, int]) -> dict[int, int]:
    return {dim: size for dim, size in own.items() if sizes.get(dim, 1) == 1}


# --- Distances of the rows of one matrix ------------------------------------------------------------------------------


def _pairs(call: OpCall) -> OpShardingRule:
    """One distance for each pair of rows, the first row's pairs first."""
    return bind("1 1 -> p", call.shapes, call.result_shapes, lowering=_lower_pairs)


def _lower_pairs(shard: LocalContext) -> LocalProgram:
    rows = shard.call.inputs[0].shape[0]
    ((start, stop),) = shard.result_box()
    if (start, stop) == (0, shard.call.outputs[0].shape[0]):
        return same_op(shard)
    builder = LocalBuilder(1)
    pairs = builder.call("aten.triu_indices.default", rows, rows, 1, dtype=DType("int64"), device=WorkerDevice())
    pairs = builder.call("aten.slice.Tensor", pairs, 1, start, stop)
    sides = [builder.call("aten.select.int", pairs, 0, side) for side in (0, 1)]
    one, other = [builder.call("aten.index_select.default", Input(0), 0, side) for side in sides]
    apart = builder.call("aten.sub.Tensor", one, other)
    return builder.finish(
        builder.call("aten.linalg_vector_norm.default", apart, shard.call.arg(1, "p", 2.0), ListArg((1,)))
    )


def _pairs_backward(call: OpCall) -> OpShardingRule | None:
    """As the distances are known, every column of the matrix has a gradient of its own."""
    return bind(
        "1, 1 m, 1 -> 1 m", call.shapes, call.result_shapes, passes=each_of((0,)), lowering=_lower_pairs_backward
    )


def _lower_pairs_backward(shard: LocalContext) -> LocalProgram:
    """The kernel wants dense matrices."""
    builder = LocalBuilder(3)
    rows = builder.call("aten.clone.default", Input(1), memory_format=MemoryFormat("contiguous_format"))
    return builder.finish(builder.call(shard.call.op, Input(0), rows, shard.call.arg(2, "p"), Input(2)))


# --- The table --------------------------------------------------------------------------------------------------------

_BILINEAR = each_of((0,), (1,))

CONTRACTION: dict[str, OpEntry] = {
    "aten.mm": _product("i k, k j -> i j | reduce(sum): k", *_BILINEAR),
    "aten._int_mm": _product("i k, k j -> i j | reduce(sum): k"),
    "aten.bmm": _product("b i k, b k j -> b i j | reduce(sum): k", *_BILINEAR),
    "aten.mv": _product("i k, k -> i | reduce(sum): k", *_BILINEAR),
    "aten.dot": _product("k, k -> ... | reduce(sum): k", *_BILINEAR),
    "aten.vdot": _product("k, k -> ... | reduce(sum): k", *_BILINEAR),
    "aten.ger": _product("i, j -> i j", *_BILINEAR),
    "aten.outer": _product("i, j -> i j", *_BILINEAR),
    "aten.addmm": _product_added("i k, k j", "i j", "k"),
    "aten.baddbmm": _product_added("b i k, b k j", "b i j", "k"),
    "aten.addbmm": _product_added("b i k, b k j", "i j", "b k"),
    "aten.addmv": _product_added("i k, k", "i", "k"),
    "aten.addr": _product_added("i, j", "i j", ""),
    "aten.linear": OpEntry(_linear),
    "aten._trilinear": OpEntry(_trilinear),
    "aten._cdist_forward": _product("... i m, ... j m -> ... i j | whole: m"),
    "aten._euclidean_dist": _product("... i m, ... j m -> ... i j | whole: m"),
    "aten._cdist_backward": _product(
        "... i j, ... i m, ... j m, ... i j -> ... i m | reduce(sum): j", *each_of((0,)), lowering=unless_empty()
    ),
    "aten._pdist_forward": OpEntry(_pairs),
    "aten._pdist_backward": OpEntry(_pairs_backward),
}
