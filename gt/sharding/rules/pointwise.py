"""Pointwise ops, with broadcasting."""

from __future__ import annotations

import cmath
from collections.abc import Sequence

from gt.core.signatures import Complex, Input, Scalar
from gt.sharding.dtypes import cast_keeps_sums, is_complex, is_floating
from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import LocalContext, LocalProgram, Lowering, OpCall, inputs_in
from gt.sharding.rules.entry import OpEntry, for_ops
from gt.sharding.rules.support.dims import wrap_dim
from gt.sharding.rules.support.local_programs import same_op, zeros_if_empty

# --- Passthroughs of partial values; their operands are positions of arguments here -----------------------------------


def linear(*positions: int) -> PartialPassthrough:
    """For an op that is linear in these arguments together. If one of them is a number, only one worker adds it."""
    return PartialPassthrough(frozenset(positions))


def keeps(kind: str, *positions: int) -> PartialPassthrough:
    return PartialPassthrough(frozenset(positions), kind, kind)


def flips(kind: str, result_kind: str) -> PartialPassthrough:
    return PartialPassthrough(frozenset({0}), kind, result_kind)


LINEAR = (linear(0),)
INCREASING = (keeps("max", 0), keeps("min", 0))  # defined everywhere, NaN stays NaN
DECREASING = (flips("max", "min"), flips("min", "max"))
ANY_KIND = (*LINEAR, *INCREASING, keeps("prod", 0), keeps("and", 0), keeps("or", 0))
CHOICE = (linear(1, 2), *[keeps(kind, 1, 2) for kind in ("max", "min", "prod", "and", "or")])
BOTH_ORDERS = tuple([keeps(kind, *positions) for kind in ("max", "min") for positions in ((0,), (1,))])
BOTH_LOGICS = tuple([keeps(kind, *positions) for kind in ("and", "or") for positions in ((0,), (1,))])

_NUMBER_TYPES = (bool, int, float, Scalar, Complex)


def _passthrough_for(call: OpCall, passthrough: PartialPassthrough) -> PartialPassthrough | None:
    """The passthrough for a call, with positions of inputs as operands. None if the arguments are not tensors, or if
    rounding or overflow makes reducing before the op differ from reducing after it."""
    named = [call.args[position] for position in passthrough.operands if position < len(call.args)]
    others = [value for position, value in enumerate(call.args) if position not in passthrough.operands]
    positions = {value.index for value in named if isinstance(value, Input)}
    if not positions or positions & {value.index for value in inputs_in(others, call.kwargs)}:
        return None
    if passthrough.kind == "prod" and any(isinstance(value, _NUMBER_TYPES) for value in named):
        return None
    targets = {meta.dtype for meta in call.outputs}
    if not all(
        _commutes(passthrough, call.inputs[position].dtype, target) for position in positions for target in targets
    ):
        return None
    return passthrough._replace(operands=frozenset(positions))


def _commutes(passthrough: PartialPassthrough, source: str, target: str) -> bool:
    """Whether a reduction gives the same before and after a cast from `source` to `target`."""
    if passthrough.kind in ("and", "or"):
        return source == target == "bool"
    if passthrough.kind in ("sum", "prod"):
        return cast_keeps_sums(source, target)
    if passthrough.kind != passthrough.result_kind:  # the smallest integer has no negative
        return is_floating(source) and source == target
    if is_complex(source):
        return False
    return source == target or (is_floating(target) and not target.startswith("float8"))


def _add_numbers_once(positions: Sequence[int], shard: LocalContext) -> LocalProgram:
    """The op on partial sums. Workers but the first get 0 for the numbers at `positions`."""
    (result, *_) = shard.results
    if result.kind != "sum" or shard.is_first_along(result.partial):
        return same_op(shard)
    return same_op(shard, dict.fromkeys(positions, 0))


def elementwise(*passthroughs: PartialPassthrough, lowering: Lowering | None = None) -> OpEntry:
    """A pointwise op on any number of tensors. `lowering` is used unless numbers must be added by one worker only."""

    def rule(call: OpCall) -> OpShardingRule:
        found = {
            passthrough: passed
            for passthrough in passthroughs
            if (passed := _passthrough_for(call, passthrough)) is not None
        }
        summed = {position for passthrough in found if passthrough.kind == "sum" for position in passthrough.operands}
        numbers = [
            position
            for position, value in enumerate(call.args)
            if position in summed and isinstance(value, _NUMBER_TYPES)
        ]
        chosen = (lambda shard: _add_numbers_once(numbers, shard)) if numbers else lowering
        operands = ", ".join(["..."] * len(call.inputs))
        results = ", ".join(["..."] * len(call.outputs))
        shapes = (call.shapes, call.result_shapes)
        return bind(f"{operands} -> {results}", *shapes, passthroughs=tuple(found.values()), lowering=chosen)

    return OpEntry(rule)


def _power(call: OpCall) -> OpShardingRule | None:
    """Products pass for integer exponents: (a b)^n = a^n b^n."""
    exponent = call.arg(1, "exponent")
    is_whole = isinstance(exponent, int | float) and float(exponent).is_integer()
    return elementwise(*([keeps("prod", 0)] if is_whole else [])).rule(call)


def _divide(call: OpCall) -> OpShardingRule | None:
    """Partial sums pass only for a scalar divisor: a tensor may contain zeros, and quotients by 0 do not add up."""
    is_linear = call.arg(2, "rounding_mode") is None and call.tensor(1, "other") is None
    return elementwise(*(LINEAR if is_linear else ())).rule(call)


def _is_divisor(number: complex) -> bool:
    return number != 0 and cmath.isfinite(number)


def _any_number(_: complex) -> bool:
    """For ops that replace elements by a number: one worker does so, and the others by 0."""
    return True


# --- Gated units ------------------------------------------------------------------------------------------------------


def _halves(position: int) -> OpEntry:
    """A gated unit, which combines the two halves of a dim; `position` is that of its argument `dim`."""

    def rule(call: OpCall) -> OpShardingRule:
        rank = len(call.shapes[0])
        gated = wrap_dim(call.arg(position, "dim", -1), rank)
        dims = " ".join(["1" if dim == gated else f"d{dim}" for dim in range(rank)])
        text = f"{', '.join([dims] * len(call.inputs))} -> {dims}"
        return bind(text, call.shapes, call.result_shapes)

    return OpEntry(rule)


# --- The table --------------------------------------------------------------------------------------------------------


POINTWISE: dict[str, OpEntry] = {
    **for_ops(
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
    # Random: each element depends on its position in the whole tensor, which the worker knows.
    **for_ops(
        elementwise(),
        """
        bernoulli cauchy exponential geometric log_normal normal normal_functional random uniform
        """,
    ),
    **for_ops(
        elementwise(*INCREASING),
        """
        asinh atan ceil clamp clamp_max clamp_min erf exp exp2 expm1 floor hardtanh relu round sigmoid sinh tanh trunc
        """,
    ),
    **for_ops(elementwise(*LINEAR), "conj_physical _conj_physical deg2rad rad2deg"),
    # Backward of pointwise functions: linear in the gradient, their first argument.
    **for_ops(
        elementwise(*LINEAR),
        """
        elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
        leaky_relu_backward log_sigmoid_backward logit_backward mish_backward native_dropout_backward
        rrelu_with_noise_backward sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward
        threshold_backward _prelu_kernel_backward
        """,
    ),
    **for_ops(elementwise(*ANY_KIND), "clone _to_copy"),
    **for_ops(elementwise(linear(0, 1)), "add sub rsub lerp complex"),
    **for_ops(elementwise(*DECREASING), "erfc"),
    **for_ops(elementwise(*BOTH_LOGICS, keeps("and", 0, 1)), "logical_and bitwise_and"),
    **for_ops(elementwise(*BOTH_LOGICS, keeps("or", 0, 1)), "logical_or bitwise_or"),
    **for_ops(elementwise(flips("and", "or"), flips("or", "and")), "logical_not bitwise_not"),
    **for_ops(
        elementwise(linear(0, 1), linear(1), keeps("max", 0, 1), keeps("min", 0, 1))._replace(
            is_linear_with=_any_number
        ),
        "fill copy",
    ),
    "aten.addcdiv": elementwise(),
    "aten.addcmul": elementwise(linear(0, 1), linear(0, 2)),
    "aten.div": OpEntry(_divide, is_linear_with=_is_divisor),
    "aten.masked_fill": elementwise(linear(0, 2), keeps("max", 0, 2), keeps("min", 0, 2))._replace(
        is_linear_with=_any_number
    ),
    "aten.maximum": elementwise(*BOTH_ORDERS, keeps("max", 0, 1)),
    "aten.minimum": elementwise(*BOTH_ORDERS, keeps("min", 0, 1)),
    "aten.mul": elementwise(linear(0), linear(1), keeps("prod", 0, 1)),
    "aten.native_dropout": elementwise(lowering=zeros_if_empty()),  # an empty mask would have the input's dtype
    "aten.neg": elementwise(*LINEAR, *DECREASING),
    "aten.pow": OpEntry(_power),
    "aten.reciprocal": elementwise(keeps("prod", 0)),
    "aten.where": elementwise(*CHOICE)._replace(is_linear_with=_any_number),
    "aten.zero": elementwise(*LINEAR, *INCREASING),
    "aten.glu": _halves(1),
    "aten.glu_backward": _halves(2),
    "aten.glu_jvp": _halves(3),
    "aten.glu_backward_jvp": _halves(5),
}
