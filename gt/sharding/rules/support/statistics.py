"""Expansions of softmax and norms: statistics over the cut dims, which are small, then pointwise ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from gt.core.signatures import Arg, Input
from gt.sharding.boxes import Shape
from gt.sharding.dtypes import accumulation_dtype
from gt.sharding.op_calls import Expansion, OpCall
from gt.sharding.rules.entry import Expand
from gt.sharding.rules.support.dims import is_any_cut
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.spec import ShardingSpec

MEAN, SUM = "aten.mean.dim", "aten.sum.dim_IntList"
AFFINE = ((1, "weight"), (2, "bias"))
"""The positions and names of the arguments of a norm that scale and shift its result."""

T = TypeVar("T")
WriteExpansion: TypeAlias = Callable[[ExpansionBuilder, OpCall, Sequence[int]], Sequence[Input]]
"""Expands a call with statistics over the given dims; returns its results."""


def expand_where_cut(dims_of: Callable[[OpCall], Sequence[int]], write: WriteExpansion) -> Expand:
    """Expand a call if some of these dims of its first input is cut."""

    def expand(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        dims = dims_of(call)
        if not is_any_cut(specs[0], dims) or not call.inputs[0].elements:
            return None
        expansion = ExpansionBuilder(call)
        results = write(expansion, call, dims)
        return expansion.finish(*[expansion.cast(r, meta.dtype) for r, meta in zip(results, call.outputs, strict=True)])

    return expand


def by_output_mask(call: OpCall, position: int, results: Sequence[T]) -> list[T]:
    """The results that the argument `output_mask` asks for."""
    return [result for result, wanted in zip(results, call.arg(position, "output_mask"), strict=True) if wanted]


# --- Parts of expansions ----------------------------------------------------------------------------------------------


def widened_input(expansion: ExpansionBuilder, position: int) -> Input:
    """An input in the dtype in which statistics are computed."""
    return expansion.cast(Input(position), accumulation_dtype(expansion.dtype(Input(position))))


def optional_input(
    expansion: ExpansionBuilder, call: OpCall, position: int, name: str, shape: Sequence[int] | None = None
) -> Input | None:
    """A tensor argument, widened and viewed in a shape; None if it is absent."""
    index = call.tensor(position, name)
    if index is None:
        return None
    value = widened_input(expansion, index)
    return value if shape is None else expansion.view(value, shape)


def per_channel_shape(shape: Shape) -> Shape:
    """The shape in which a vector of one element per channel broadcasts with (batch, channels, ...)."""
    return (shape[1], *[1] * len(shape[2:]))


def mul(expansion: ExpansionBuilder, a: Input, b: Input) -> Input:
    return expansion.pointwise("aten.mul.Tensor", a, b)


def sub(expansion: ExpansionBuilder, a: Input, b: Input) -> Input:
    return expansion.pointwise("aten.sub.Tensor", a, b)


class Moments(NamedTuple):
    """Values minus their mean, the mean, the variance, and 1 / sqrt(variance + eps)."""

    centered: Input
    mean: Input
    variance: Input
    rstd: Input


def moments(expansion: ExpansionBuilder, values: Input, dims: Sequence[int], eps: Arg) -> Moments:
    mean = expansion.reduce(MEAN, values, dims)
    centered = sub(expansion, values, mean)
    variance = expansion.reduce(MEAN, expansion.pointwise("aten.pow.Tensor_Scalar", centered, 2), dims)
    rstd = expansion.pointwise("aten.rsqrt.default", expansion.pointwise("aten.add.Scalar", variance, eps))
    return Moments(centered, mean, variance, rstd)


def affine(expansion: ExpansionBuilder, values: Input, weight: Input | None, bias: Input | None) -> Input:
    values = values if weight is None else mul(expansion, values, weight)
    return values if bias is None else expansion.pointwise("aten.add.Tensor", values, bias)


class NormGradients(NamedTuple):
    """The gradients of a norm, from the gradient of its output, the normalized values, and 1 / sqrt(variance + eps)."""

    grad_output: Input
    normalized: Input
    rstd: Input

    def of_input(self, expansion: ExpansionBuilder, weight: Input | None, dims: Sequence[int]) -> Input:
        inner = self.grad_output if weight is None else mul(expansion, self.grad_output, weight)
        mean = expansion.reduce(MEAN, inner, dims)
        slope = expansion.reduce(MEAN, mul(expansion, inner, self.normalized), dims)
        rest = sub(expansion, sub(expansion, inner, mean), mul(expansion, self.normalized, slope))
        return mul(expansion, rest, self.rstd)

    def of_weight(self, expansion: ExpansionBuilder, batch: Sequence[int]) -> Input:
        return expansion.reduce(SUM, mul(expansion, self.grad_output, self.normalized), batch, keepdim=False)

    def of_bias(self, expansion: ExpansionBuilder, batch: Sequence[int]) -> Input:
        return expansion.reduce(SUM, self.grad_output, batch, keepdim=False)
