"""Scaled dot product attention. Batch, heads and queries may be cut. If keys are cut, the attention to each block of
keys is computed and the results are averaged by their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gt.core.signatures import DType, Input, ListArg, WorkerDevice
from gt.sharding.boxes import Interval
from gt.sharding.dtypes import accumulation_dtype
from gt.sharding.factors import LINEAR, BlockWindow, FactorRef, OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.blocks import cuts_from_arg, cuts_to_arg, local_blocks, one_per_block
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder, contiguous_meta
from gt.sharding.rules.support.local_programs import same_op, zeros, zeros_if_empty
from gt.sharding.rules.support.statistics import SUM, mul, sub
from gt.sharding.spec import ShardingSpec

ATTEND = "aten._scaled_dot_product_flash_attention_for_cpu.default"
MINUS_INFINITY = float("-inf")


def _rule(
    call: OpCall,
    operands: str,
    results: str,
    roles: str,
    query: int,
    causal: int,
    passthroughs: Sequence[PartialPassthrough] = (),
) -> OpShardingRule:
    """A rule from text in which H are the heads of the query: as many as the key has, or several for each of those.
    `query` and `causal` are positions of arguments."""
    heads, key_heads = call.inputs[query].shape[1], call.inputs[query + 1].shape[1]
    shared = heads != key_heads
    text = f"{operands}{_mask_text(call)} -> {results} | {roles}" + ("; whole: g" if shared else "")
    text = text.replace("H", "(h g)" if shared else "h")
    sizes = {"g": heads // key_heads} if shared else {}
    lowering = zeros_if_empty(lambda shard: _lower(shard, query, causal))
    return bind(text, call.shapes, call.result_shapes, sizes=sizes, passthroughs=passthroughs, lowering=lowering)


def _mask_text(call: OpCall) -> str:
    mask = call.kwargs.get("attn_mask")
    if not isinstance(mask, Input):
        return ""
    shape = call.inputs[mask.index].shape
    names = ["b", "H", "l", "s"][-len(shape) :]
    return ", " + " ".join(["1" if size == 1 else name for name, size in zip(names, shape, strict=True)])


def _attention(call: OpCall) -> OpShardingRule:
    return _rule(call, "b H l e, b h s e, b h s e", "b H l e, b H l", "whole: s e", 0, 4)


def _attention_backward(call: OpCall) -> OpShardingRule:
    """Keys may be cut like queries, since the weights of all keys are known."""
    operands = "b H l e, b H l e, b h s e, b h s e, b H l e, b H l"
    return _rule(call, operands, "b H l e, b h s e, b h s e", "reduce(sum): l s; whole: e", 1, 7, LINEAR)


def _lower(shard: LocalContext, query: int, causal: int) -> LocalProgram:
    """If queries or keys are cut, an explicit mask replaces `is_causal`."""
    call = shard.call
    rows, columns = shard.operand_box(query)[2], shard.operand_box(query + 1)[2]
    whole = (0, call.inputs[query].shape[2]), (0, call.inputs[query + 1].shape[2])
    if not call.arg(causal, "is_causal") or (rows, columns) == whole:
        return same_op(shard)
    builder = LocalBuilder(len(call.inputs))
    mask = _causal_mask(builder, call, rows, columns, call.kwargs.get("attn_mask"))
    args = [False if position == causal else value for position, value in enumerate(call.args)]
    kwargs = {name: value for name, value in call.kwargs.items() if name != "is_causal"} | {"attn_mask": mask}
    return builder.finish(*builder.repeat(call, *args, **kwargs))


def _causal_mask(builder: LocalBuilder, call: OpCall, rows: Interval, columns: Interval, mask: object) -> Input:
    """The causal mask for intervals of queries and keys, added to the user's mask if there is one."""
    size = ListArg((rows[1] - rows[0], columns[1] - columns[0]))
    dtype = DType(call.inputs[0].dtype)
    hidden = builder.call("aten.full.default", size, MINUS_INFINITY, dtype=dtype, device=WorkerDevice())
    later = builder.call("aten.triu.default", hidden, 1 + rows[0] - columns[0])
    return builder.call("aten.add.Tensor", mask, later) if isinstance(mask, Input) else later


# --- Cut keys ---------------------------------------------------------------------------------------------------------


def _expand_attention(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    if not specs[1].dims[2] or not call.inputs[0].elements or not call.inputs[1].elements:
        return None
    expansion = ExpansionBuilder(call)
    blocks = specs[1].intervals(call.inputs[1].shape, 2)
    metas = [contiguous_meta((len(blocks), *meta.shape), accumulation_dtype(meta.dtype)) for meta in call.outputs]
    kwargs = {name: value for name, value in call.kwargs.items() if name != "is_causal"}
    args = (*call.args[:3], bool(call.arg(4, "is_causal")), cuts_to_arg(blocks))
    parts, logs = expansion.call_multi("gt.block_attention", args, metas, kwargs)
    largest = expansion.reduce("aten.amax.default", logs, (0,))
    nothing = expansion.pointwise("aten.eq.Scalar", largest, MINUS_INFINITY, dtype="bool")
    largest = expansion.pointwise("aten.masked_fill.Scalar", largest, nothing, 0)
    weights = expansion.pointwise("aten.exp.default", sub(expansion, logs, largest))
    total = expansion.reduce(SUM, weights, (0,), keepdim=False)
    total = expansion.pointwise("aten.masked_fill.Scalar", total, expansion.squeeze(nothing, (0,)), 1)
    weights = expansion.cast(expansion.view(weights, (*metas[1].shape, 1)), metas[0].dtype)
    summed = expansion.reduce(SUM, mul(expansion, parts, weights), (0,), keepdim=False)
    divisor = expansion.cast(expansion.view(total, (*call.outputs[1].shape, 1)), metas[0].dtype)
    result = expansion.cast(expansion.pointwise("aten.div.Tensor", summed, divisor), call.outputs[0].dtype)
    log = expansion.pointwise(
        "aten.add.Tensor", expansion.pointwise("aten.log.default", total), expansion.squeeze(largest, (0,))
    )
    return expansion.finish(result, log)


def _block_attention(call: OpCall) -> OpShardingRule:
    """gt.block_attention(query, key, value, is_causal, blocks, *, attn_mask, scale): the attention to each block of
    keys, and the logarithm of its weight."""
    blocks = one_per_block(cuts_from_arg(call.arg(4, "blocks")))
    rule = _rule(call, "b H l e, b h s e, b h s e", "p b H l e, p b H l", "whole: e", 0, 3)
    factors = {name: factor for name, factor in rule.factors.items() if name != "p"}
    results = tuple([((FactorRef("s", blocks),), *dims[1:]) for dims in rule.results])
    return dataclasses.replace(
        rule, factors=factors, results=results, lowering=lambda shard: _lower_blocks(shard, blocks)
    )


def _lower_blocks(shard: LocalContext, blocks: BlockWindow) -> LocalProgram:
    call = shard.call
    builder = LocalBuilder(len(call.inputs))
    if 0 in shard.operand_shape(0):
        outputs = enumerate(call.outputs)
        return builder.finish(*[zeros(builder, shard.result_shape(position), meta.dtype) for position, meta in outputs])
    made = [_attend(builder, shard, block) for block in local_blocks(shard, blocks, 0)]
    return builder.finish(*[builder.call("aten.cat.default", ListArg(parts), 0) for parts in zip(*made, strict=True)])


def _attend(builder: LocalBuilder, shard: LocalContext, block: Interval) -> tuple[Input, Input]:
    """The attention of a shard of queries to one block of keys and its log weight, each with a new first dim."""
    call = shard.call
    shape, dtypes = shard.result_shape(), [meta.dtype for meta in call.outputs]
    if block[0] == block[1]:
        logs = builder.call(
            "aten.full.default",
            ListArg((1, *shape[1:4])),
            MINUS_INFINITY,
            dtype=DType(dtypes[1]),
            device=WorkerDevice(),
        )
        return zeros(builder, (1, *shape[1:]), dtypes[0]), logs
    start = shard.operand_box(1)[2][0]
    bounds = (block[0] - start, block[1] - start)
    key, value = [builder.call("aten.slice.Tensor", Input(position), 2, *bounds) for position in (1, 2)]
    mask = call.kwargs.get("attn_mask")
    if isinstance(mask, Input) and call.inputs[mask.index].shape[-1] != 1:
        mask = builder.call("aten.slice.Tensor", mask, -1, *bounds)
    if call.arg(3, "is_causal"):
        mask = _causal_mask(builder, call, shard.operand_box(0)[2], block, mask)
    output, logs = builder.call_multi(
        ATTEND, 2, Input(0), key, value, 0.0, False, attn_mask=mask, scale=call.kwargs.get("scale")
    )
    if isinstance(mask, Input):  # the op returns weight 1 for a query whose keys are all masked
        seen = builder.call("aten.amax.default", mask, ListArg((-1,)))
        hidden = builder.call("aten.eq.Scalar", seen, MINUS_INFINITY)
        logs = builder.call("aten.masked_fill.Scalar", logs, hidden, MINUS_INFINITY)
    wider = builder.call("aten._to_copy.default", output, dtype=DType(dtypes[0]))
    return builder.call("aten.unsqueeze.default", wider, 0), builder.call("aten.unsqueeze.default", logs, 0)


ATTENTION: dict[str, OpEntry] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": OpEntry(_attention, _expand_attention),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": OpEntry(_attention_backward),
    "gt.block_attention": OpEntry(_block_attention),
}
