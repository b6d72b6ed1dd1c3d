"""What softmax and the norms share: an op as its statistics over some dims, which are small, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from gt.core.signatures import Arg, Input
from gt.sharding.factors import PartialPassthrough
from gt.sharding.op_calls import Expansion, OpCall
from gt.sharding.rules.entry import Expand
from gt.sharding.rules.support.decomposition import Decomposition
from gt.sharding.rules.support.dims import dims_cut
from gt.sharding.rules.support.dtypes import wide
from gt.sharding.spec import ShardingSpec

MEAN, SUM = "aten.mean.dim", "aten.sum.dim_IntList"
LINEAR = (PartialPassthrough(frozenset({0})),)
"""Gradients are linear in the gradient that comes in."""

T = TypeVar("T")
Write: TypeAlias = Callable[[Decomposition, OpCall, Sequence[int]], Sequence[Input]]
"""Writes an op as several, with statistics over some dims; gives its results."""


def where_cut(dims_of: Callable[[OpCall], Sequence[int]], write: Write) -> Expand:
    """Write an op as several where some of these dims of its first input is cut."""

    def expand(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        dims = dims_of(call)
        if not dims_cut(specs[0], dims) or not call.inputs[0].elements:
            return None
        pieces = Decomposition(call)
        results = write(pieces, call, dims)
        return pieces.finish(*[pieces.cast(r, meta.dtype) for r, meta in zip(results, call.outputs, strict=True)])

    return expand


# --- Pieces -----------------------------------------------------------------------------------------------------------


def widened(pieces: Decomposition, place: int) -> Input:
    """An input in the dtype in which statistics are computed."""
    return pieces.cast(Input(place), wide(pieces.dtype(Input(place))))


def optional(
    pieces: Decomposition, call: OpCall, place: int, name: str, shape: Sequence[int] | None = None
) -> Input | None:
    """A tensor argument in a wide dtype and another shape, if it is there."""
    index = call.tensor(place, name)
    if index is None:
        return None
    value = widened(pieces, index)
    return value if shape is None else pieces.view(value, shape)


def mul(pieces: Decomposition, a: Input, b: Input) -> Input:
    return pieces.each("aten.mul.Tensor", a, b)


def sub(pieces: Decomposition, a: Input, b: Input) -> Input:
    return pieces.each("aten.sub.Tensor", a, b)


class Normal(NamedTuple):
    """Values without their mean, the mean, the variance, and one over the root of it."""

    apart: Input
    mean: Input
    variance: Input
    scale: Input


def normal_of(pieces: Decomposition, values: Input, dims: Sequence[int], eps: Arg) -> Normal:
    mean = pieces.over(MEAN, values, dims)
    apart = sub(pieces, values, mean)
    variance = pieces.over(MEAN, pieces.each("aten.pow.Tensor_Scalar", apart, 2), dims)
    scale = pieces.each("aten.rsqrt.default", pieces.each("aten.add.Scalar", variance, eps))
    return Normal(apart, mean, variance, scale)


def affine(pieces: Decomposition, values: Input, weight: Input | None, bias: Input | None) -> Input:
    values = values if weight is None else mul(pieces, values, weight)
    return values if bias is None else pieces.each("aten.add.Tensor", values, bias)


class Gradients(NamedTuple):
    """What the gradients of a norm are made of: the gradient of its output, the normalised values, their scale."""

    output: Input
    normal: Input
    scale: Input

    def of_input(self, pieces: Decomposition, weight: Input | None, dims: Sequence[int]) -> Input:
        inner = self.output if weight is None else mul(pieces, self.output, weight)
        level = pieces.over(MEAN, inner, dims)
        tilt = pieces.over(MEAN, mul(pieces, inner, self.normal), dims)
        rest = sub(pieces, sub(pieces, inner, level), mul(pieces, self.normal, tilt))
        return mul(pieces, rest, self.scale)

    def of_weight(self, pieces: Decomposition, batch: Sequence[int]) -> Input:
        return pieces.over(SUM, mul(pieces, self.output, self.normal), batch, keepdim=False)

    def of_bias(self, pieces: Decomposition, batch: Sequence[int]) -> Input:
        return pieces.over(SUM, self.output, batch, keepdim=False)


def asked(call: OpCall, place: int, results: Sequence[T]) -> list[T]:
    """Those of the results that the argument `output_mask` asks for."""
    return [result for result, wanted in zip(results, call.arg(place, "output_mask"), strict=True) if wanted]
