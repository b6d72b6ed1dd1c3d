"""Reshapes, by the common factors of two shapes: (8, 4) -> (2, 16) is (a b) c -> a (b c) with a=2 b=4 c=4."""

from __future__ import annotations

import math

from gt.core.meta import ITEM_BYTES
from gt.core.signatures import DType, Input, ListArg
from gt.sharding.boxes import Shape
from gt.sharding.factors import WHOLE, FactorRef, OpShardingRule, RuleBuilder, bind
from gt.sharding.op_calls import LocalContext, LocalProgram, OpCall
from gt.sharding.rules.support.element_moves import all_partial_kinds
from gt.sharding.rules.support.local_programs import single_call


def reshape(call: OpCall) -> OpShardingRule:
    builder = RuleBuilder()
    source, target = _ReshapeSide(call.shapes[0]), _ReshapeSide(call.result_shapes[0])
    if 0 in source.shape:
        _share_prefix(builder, source, target)
    else:
        _share_factors(builder, source, target)
    builder.operands.append(tuple(map(tuple, source.dims)))
    builder.results.append(tuple(map(tuple, target.dims)))

    def lower(shard: LocalContext) -> LocalProgram:
        return single_call(shard, shard.call.op, Input(0), ListArg(shard.result_shape()))

    return builder.build(all_partial_kinds(call, 0), lower)


class _ReshapeSide:
    """One shape of a reshape: the factors assigned to its dims so far, their product, and the remaining size of the
    current dim (`left`)."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.dims: list[list[FactorRef]] = [[] for _ in shape]
        self.product = 1
        self._dim = -1
        self.left = 1
        self._advance()

    def take(self, factor: str, size: int) -> None:
        self.dims[self._dim].append(FactorRef(factor))
        self.product *= size
        self.left //= size
        self._advance()

    def _advance(self) -> None:
        while self.left == 1 and self._dim + 1 < len(self.shape):
            self._dim += 1
            self.left = self.shape[self._dim]


def _share_factors(builder: RuleBuilder, source: _ReshapeSide, target: _ReshapeSide) -> None:
    """Walk both shapes from the left. If the products of the factors so far are equal, so are the strides, and a common
    divisor of the remaining sizes is a shared factor. Otherwise the side with the smaller product gets a private
    factor, which cannot be cut: one that makes the products equal, or leaves a common divisor for later."""

    def private(side: _ReshapeSide, size: int) -> None:
        if size > 1:
            side.take(builder.factor(f"p{len(builder.factors)}", size, WHOLE), size)

    while source.left > 1 or target.left > 1:
        shared = math.gcd(source.left, target.left)
        if source.product != target.product:
            behind, ahead = sorted((source, target), key=lambda side: side.product)
            meet, off = divmod(ahead.product, behind.product)
            size = meet if not off and behind.left % meet == 0 else behind.left // shared
            private(behind, size if size > 1 else behind.left)
        elif shared > 1:
            name = builder.factor(f"f{len(builder.factors)}", shared)
            source.take(name, shared)
            target.take(name, shared)
        else:
            sizes = source.left, target.left
            private(source, sizes[0])
            private(target, sizes[1])


def _share_prefix(builder: RuleBuilder, source: _ReshapeSide, target: _ReshapeSide) -> None:
    """Factors for tensors without elements: the dims that both shapes start with."""
    for dim, (a, b) in enumerate(zip(source.shape, target.shape, strict=False)):
        if a != b or a == 0:
            break
        name = builder.factor(f"f{dim}", a)
        source.dims[dim].append(FactorRef(name))
        target.dims[dim].append(FactorRef(name))


def reinterpret(call: OpCall) -> OpShardingRule:
    """The rule of `view(dtype)`: the tensor with the smaller dtype has several elements for each of the other, along
    the last dim."""
    dtype = call.arg(1, "dtype")
    assert isinstance(dtype, DType)
    before, after = ITEM_BYTES[call.inputs[0].dtype], ITEM_BYTES[dtype.name]
    if before == after:
        return bind("... -> ...", call.shapes, call.result_shapes)
    sides = ("... d", "... (d k)") if before > after else ("... (d k)", "... d")
    return bind(f"{sides[0]} -> {sides[1]} | whole: k", call.shapes, call.result_shapes)
