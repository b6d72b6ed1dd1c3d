"""Ops that compute each element from the elements at the same place, with broadcasting."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence

from gt.core.signatures import Complex, DType, Input, Scalar
from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall, inputs_in
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import wrap
from gt.sharding.rules.support.dtypes import adds_up, is_complex, is_floating, wide
from gt.sharding.rules.support.local_programs import same_op, unless_empty

# --- Partial values that pass: the operands of a Passing are positions of arguments here -----------------------------


def sums(*positions: int) -> PartialPassthrough:
    """The op is linear in these arguments together. Those of them that are numbers are given once."""
    return PartialPassthrough(frozenset(positions))


def kept(kind: str, *positions: int) -> PartialPassthrough:
    return PartialPassthrough(frozenset(positions), kind, kind)


def turned(kind: str, gives: str) -> PartialPassthrough:
    return PartialPassthrough(frozenset({0}), kind, gives)


LINEAR = (sums(0),)
RISING = (kept("max", 0), kept("min", 0))  # defined everywhere, NaN stays NaN
FALLING = (turned("max", "min"), turned("min", "max"))
ANY_KIND = (*LINEAR, *RISING, kept("prod", 0), kept("and", 0), kept("or", 0))
CHOICE = (sums(1, 2), *[kept(kind, 1, 2) for kind in ("max", "min", "prod", "and", "or")])
BOTH_ORDERS = tuple([kept(kind, *places) for kind in ("max", "min") for places in ((0,), (1,))])
BOTH_LOGICS = tuple([kept(kind, *places) for kind in ("and", "or") for places in ((0,), (1,))])

_NUMBERS = (bool, int, float, Scalar, Complex)


def _passes(call: OpCall, passing: PartialPassthrough) -> PartialPassthrough | None:
    """What passes in a call. None where the arguments are not tensors, or where rounding or wrapping around makes it
    matter whether values are reduced before the op or after it."""
    named = [call.args[position] for position in passing.operands if position < len(call.args)]
    others = [value for position, value in enumerate(call.args) if position not in passing.operands]
    places = {value.index for value in named if isinstance(value, Input)}
    if not places or places & {value.index for value in inputs_in(others, call.kwargs)}:
        return None
    if passing.kind == "prod" and any(isinstance(value, _NUMBERS) for value in named):
        return None
    targets = {meta.dtype for meta in call.outputs}
    if not all(_commutes(passing, call.inputs[place].dtype, target) for place in places for target in targets):
        return None
    return passing._replace(operands=frozenset(places))


def _commutes(passing: PartialPassthrough, source: str, target: str) -> bool:
    """Whether values of a dtype may be reduced before or after they become another one."""
    if passing.kind in ("and", "or"):
        return source == target == "bool"
    if passing.kind in ("sum", "prod"):
        return adds_up(source, target)
    if passing.kind != passing.gives:  # the smallest integer is not the negative of any
        return is_floating(source) and source == target
    if is_complex(source):
        return False
    return source == target or (is_floating(target) and not target.startswith("float8"))


def _numbers_once(positions: Sequence[int], shard: LocalContext) -> LocalProgram:
    """Of values to be added up, only the first has the number in it."""
    (result, *_) = shard.results
    if result.kind != "sum" or shard.is_first_along(result.partial):
        return same_op(shard)
    return same_op(shard, dict.fromkeys(positions, 0))


def elementwise(*passes: PartialPassthrough, otherwise: Lowering | None = None) -> OpEntry:
    """Any number of tensors that broadcast to the results. `otherwise`: the lowering, where no number is given once."""

    def rule(call: OpCall) -> OpShardingRule:
        found = {passing: passed for passing in passes if (passed := _passes(call, passing)) is not None}
        summed = {position for passing in found if passing.kind == "sum" for position in passing.operands}
        numbers = [place for place, value in enumerate(call.args) if place in summed and isinstance(value, _NUMBERS)]
        lowering = (lambda shard: _numbers_once(numbers, shard)) if numbers else otherwise
        operands = ", ".join(["..."] * len(call.inputs))
        results = ", ".join(["..."] * len(call.outputs))
        shapes = (call.shapes, call.result_shapes)
        return bind(f"{operands} -> {results}", *shapes, passes=tuple(found.values()), lowering=lowering)

    return OpEntry(rule)


def _power(call: OpCall) -> OpShardingRule | None:
    """(a b)^n = a^n b^n for whole n."""
    exponent = call.arg(1, "exponent")
    is_whole = isinstance(exponent, int | float) and float(exponent).is_integer()
    return elementwise(*([kept("prod", 0)] if is_whole else [])).rule(call)


def _divide(call: OpCall) -> OpShardingRule | None:
    """A tensor of divisors may have zeros, by which partial values must not be divided: they are reduced first."""
    is_linear = call.arg(2, "rounding_mode") is None and call.tensor(1, "other") is None
    return elementwise(*(LINEAR if is_linear else ())).rule(call)


def _is_divisor(number: complex) -> bool:
    return number != 0 and cmath.isfinite(number)


def _any_number(_: complex) -> bool:
    """For ops that put a number in place of elements: one of the values that are added up has it."""
    return True


# --- Losses that are the sum or mean of elements ----------------------------------------------------------------------

_EACH, _MEAN, _SUM = 0, 1, 2


def _loss(position: int) -> OpEntry:
    """`position` is that of the argument `reduction`, which is the mean if absent."""

    def rule(call: OpCall) -> OpShardingRule | None:
        if call.arg(position, "reduction", _MEAN) == _EACH:
            return elementwise().rule(call)
        whole = _broadcast(call)
        names = [f"d{place}" for place in range(len(whole))]
        operands = ", ".join([" ".join(names[len(names) - len(shape) :]) for shape in call.shapes])
        classes = f" | reduce(sum): {' '.join(names)}" if names else ""
        return bind(f"{operands} -> ...{classes}", call.shapes, call.result_shapes, lowering=lower)

    def lower(shard: LocalContext) -> LocalProgram:
        """A mean is over all elements, not over those that are here; narrow floats are added up in a wide one."""
        call, dtype = shard.call, shard.call.outputs[0].dtype
        builder = LocalBuilder(len(call.inputs))
        args = [*call.args, *[None] * (position + 1 - len(call.args))]
        args[position] = _EACH
        each = builder.call(call.op, *args, **call.kwargs)
        total = builder.call("aten.sum.default", each, dtype=DType(wide(dtype)))
        if call.arg(position, "reduction", _MEAN) == _MEAN:
            total = builder.call("aten.div.Scalar", total, math.prod(_broadcast(call)))
        return builder.finish(total if wide(dtype) == dtype else _cast(builder, total, dtype))

    return OpEntry(rule)


def _loss_backward(position: int) -> OpEntry:
    """The gradient of the result is the first argument."""

    def rule(call: OpCall) -> OpShardingRule | None:
        plain = elementwise(*LINEAR).rule(call)
        is_mean = call.arg(position, "reduction", _MEAN) == _MEAN
        return None if plain is None else OpShardingRule(**(vars(plain) | {"lowering": lower if is_mean else None}))

    def lower(shard: LocalContext) -> LocalProgram:
        """As of a sum, with the gradient of the mean divided by the number of all elements."""
        call = shard.call
        builder = LocalBuilder(len(call.inputs))
        args = [*call.args, *[None] * (position + 1 - len(call.args))]
        args[0] = builder.call("aten.div.Scalar", call.args[0], math.prod(_broadcast(call)))
        args[position] = _SUM
        return builder.finish(builder.call(call.op, *args, **call.kwargs))

    return OpEntry(rule)


def _cast(builder: LocalBuilder, value: Input, dtype: str) -> Input:
    return builder.call("aten._to_copy.default", value, dtype=DType(dtype))


def _broadcast(call: OpCall) -> tuple[int, ...]:
    """The shape that the inputs broadcast to."""
    rank = max(map(len, call.shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in call.shapes]
    return tuple([next((size for size in sizes if size != 1), 1) for sizes in zip(*aligned, strict=True)])


# --- Nearly pointwise -------------------------------------------------------------------------------------------------


def _halves(position: int) -> OpEntry:
    """Gated units: a dim, named by the last argument, of which the two halves are combined."""

    def rule(call: OpCall) -> OpShardingRule:
        rank = len(call.shapes[0])
        gated = wrap(call.arg(position, "dim", -1), rank)
        dims = " ".join(["1" if dim == gated else f"d{dim}" for dim in range(rank)])
        text = f"{', '.join([dims] * len(call.inputs))} -> {dims}"
        return bind(text, call.shapes, call.result_shapes)

    return OpEntry(rule)


# --- The table --------------------------------------------------------------------------------------------------------


def _each(entry: OpEntry, names: str) -> dict[str, OpEntry]:
    return {f"aten.{name}": entry for name in names.split()}


POINTWISE: dict[str, OpEntry] = {
    **_each(
        elementwise(),
        """
        abs acos acosh angle asin atan2 atanh bitwise_left_shift bitwise_right_shift bitwise_xor celu copysign cos cosh
        digamma elu eq erfinv floor_divide fmax fmin fmod frac frexp gcd ge gelu gt hardshrink hardsigmoid hardswish
        heaviside hypot i0 igamma igammac isinf isnan isneginf isposinf lcm ldexp le leaky_relu lgamma log log10 log1p
        log2 log_sigmoid_forward logaddexp logaddexp2 logical_xor logit lt mish mvlgamma nan_to_num ne nextafter polar
        polygamma remainder rsqrt sgn sign signbit silu sin sinc softplus softshrink sqrt tan threshold xlogy
        _add_relu _prelu_kernel __lshift__ __rshift__ __ilshift__ __irshift__ _standard_gamma_grad _dirichlet_grad
        special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
        special_chebyshev_polynomial_w special_entr special_erfcx special_hermite_polynomial_h
        special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l
        special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
        special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
        special_xlog1py special_zeta
        fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        """,
    ),
    # Random: every element from its place in the whole tensor, which the worker knows.
    **_each(
        elementwise(),
        """
        bernoulli cauchy exponential geometric log_normal normal normal_functional random uniform
        """,
    ),
    **_each(
        elementwise(*RISING),
        """
        asinh atan ceil clamp clamp_max clamp_min erf exp exp2 expm1 floor hardtanh relu round sigmoid sinh tanh trunc
        """,
    ),
    **_each(elementwise(*LINEAR), "conj_physical _conj_physical deg2rad rad2deg"),
    # Backward of pointwise functions: linear in the gradient, their first argument.
    **_each(
        elementwise(*LINEAR),
        """
        elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
        leaky_relu_backward log_sigmoid_backward logit_backward mish_backward native_dropout_backward
        rrelu_with_noise_backward sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward
        threshold_backward _prelu_kernel_backward
        """,
    ),
    **_each(elementwise(*ANY_KIND), "clone _to_copy"),
    **_each(elementwise(sums(0, 1)), "add sub rsub lerp complex"),
    **_each(elementwise(*FALLING), "erfc"),
    **_each(elementwise(*BOTH_LOGICS, kept("and", 0, 1)), "logical_and bitwise_and"),
    **_each(elementwise(*BOTH_LOGICS, kept("or", 0, 1)), "logical_or bitwise_or"),
    **_each(elementwise(turned("and", "or"), turned("or", "and")), "logical_not bitwise_not"),
    **_each(
        elementwise(sums(0, 1), sums(1), kept("max", 0, 1), kept("min", 0, 1))._replace(tame=_any_number), "fill copy"
    ),
    "aten.addcdiv": elementwise(),
    "aten.addcmul": elementwise(sums(0, 1), sums(0, 2)),
    "aten.div": OpEntry(_divide, tame=_is_divisor),
    "aten.masked_fill": elementwise(sums(0, 2), kept("max", 0, 2), kept("min", 0, 2))._replace(tame=_any_number),
    "aten.maximum": elementwise(*BOTH_ORDERS, kept("max", 0, 1)),
    "aten.minimum": elementwise(*BOTH_ORDERS, kept("min", 0, 1)),
    "aten.mul": elementwise(sums(0), sums(1), kept("prod", 0, 1)),
    "aten.native_dropout": elementwise(otherwise=unless_empty()),  # an empty mask would have the input's dtype
    "aten.neg": elementwise(*LINEAR, *FALLING),
    "aten.pow": OpEntry(_power),
    "aten.reciprocal": elementwise(kept("prod", 0)),
    "aten.where": elementwise(*CHOICE)._replace(tame=_any_number),
    "aten.zero": elementwise(*LINEAR, *RISING),
    **_each(_loss(2), "mse_loss smooth_l1_loss huber_loss soft_margin_loss"),
    "aten.binary_cross_entropy": _loss(3),
    "aten.binary_cross_entropy_with_logits": _loss(4),
    **_each(
        _loss_backward(3),
        "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward",
    ),
    "aten.binary_cross_entropy_backward": _loss_backward(4),
    "aten.glu": _halves(1),
    "aten.glu_backward": _halves(2),
    "aten.glu_jvp": _halves(3),
    "aten.glu_backward_jvp": _halves(5),
}
