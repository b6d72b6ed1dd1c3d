"""Aten's elementwise random ops as functions of a key, of the region to compute, and of the op's arguments.

Numbers are computed in float64 and rounded once, at the end. So results of devices and engines differ only where their
float64 functions do, which rounding to shorter floats mostly hides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from gt.worker.engines.counter_rng import Distribution, Region, fill_random, whole_region

RandomFunction: TypeAlias = Callable[..., Any]
Params: TypeAlias = tuple[Any, ...]

WIDTHS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""The bits of a float's mantissa."""


# Distributions


def _uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Distribution:
    """Numbers in [low, high), also after rounding to the dtype."""
    width = WIDTHS[dtype.to_real()]
    highest = max(low, _below(high, dtype.to_real()))

    def write(words: torch.Tensor, real: torch.Tensor, out: torch.Tensor) -> None:
        real.copy_(words).mul_(2.0**-width).add_(0.5)
        if (low, high) != (0, 1):
            real.mul_(high - low).add_(low).clamp_(max=highest)
        out.copy_(real)

    return Distribution(width, write)


@functools.lru_cache(1024)
def _below(bound: float, dtype: torch.dtype) -> float:
    rounded = torch.tensor(bound, dtype=dtype)
    smaller = torch.nextafter(rounded, torch.full_like(rounded, -math.inf))
    return (rounded if rounded.item() < bound else smaller).item()


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Distribution:
    """By the inverse of the distribution function: one number per word, up to 8.3 standard deviations from the mean."""
    scale = std if dtype.is_complex else std * math.sqrt(2)

    def write(words: torch.Tensor, real: torch.Tensor, out: torch.Tensor) -> None:
        real.copy_(words).add_(0.5).mul_(2.0**-52).erfinv_().mul_(scale)
        if mean:
            (real[::2] if dtype.is_complex else real).add_(mean)  # pieces hold whole complex numbers
        out.copy_(real)

    return Distribution(53, write)


def _log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Distribution:
    def write(words: torch.Tensor, real: torch.Tensor, out: torch.Tensor) -> None:
        normal.write(words, real, real)
        out.copy_(real.exp_())

    normal = _normal(dtype, mean, std)
    return Distribution(normal.width, write)


def _exponential(dtype: torch.dtype, rate: float = 1.0) -> Distribution:
    """Never 0, as in torch."""
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps

    def write(words: torch.Tensor, real: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(_logarithm(words, real).mul_(-1.0 / rate).clamp_(min=least))

    return Distribution(52, write)


def _geometric(dtype: torch.dtype, p: float) -> Distribution:
    def write(words: torch.Tensor, real: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(_logarithm(words, real).div_(math.log1p(-p)).ceil_())

    return Distribution(52, write)


def _logarithm(words: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The logarithm of numbers strictly between 0 and 1, which 52 bits represent exactly."""
    return real.copy_(words).add_(0.5).mul_(2.0**-52).add_(0.5).log_()


def _cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Distribution:
    def write(words: torch.Tensor, real: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(real.copy_(words).add_(0.5).mul_(math.pi * 2.0**-52).tan_().mul_(sigma).add_(median))

    return Distribution(52, write)


def _bernoulli(dtype: torch.dtype, p: float = 0.5) -> Distribution:
    """True where a uniform number of 53 bits is below p."""
    bound = math.ceil(p * 2**53) - 2**52
    return Distribution(53, lambda words, real, out: out.copy_(words < bound))


def _integers(dtype: torch.dtype, *bounds: int | None) -> Distribution:
    """Integers in [0, highest], [0, bound) or [from, to), as in `random_`: the remainder of 64 bits, as in torch."""
    low, high = (0, *bounds)[-2:] if bounds else (0, None)
    assert low is not None
    span = (_highest(dtype, low) + 1 if high is None else high) - low
    over = span - 2**64  # signed words from `over` to -1 are unsigned words of at least `span`

    def write(words: torch.Tensor, real: torch.Tensor, out: torch.Tensor) -> None:
        if span < 2**63:
            words.remainder_(span)
        else:
            words.sub_(((words >= over) & (words < 0)) * over)
        out.copy_(words.add_(low))

    return Distribution(64, write)


def _highest(dtype: torch.dtype, low: int) -> int:
    if low == -(2**63):
        return 2**63 - 1
    if dtype.is_floating_point:
        return 1 << WIDTHS[dtype]
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


DISTRIBUTIONS: dict[str, Callable[..., Distribution]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "log_normal_": _log_normal,
    "exponential_": _exponential,
    "geometric_": _geometric,
    "cauchy_": _cauchy,
    "bernoulli_": _bernoulli,
    "random_": _integers,
}


@functools.lru_cache(1024)
def check_by_torch(method: str, dtype: torch.dtype, params: Params) -> None:
    """Raise torch's error for such arguments, by drawing one number with them."""
    getattr(torch.empty(1, dtype=dtype, device="cpu"), method)(*params, generator=torch.Generator())


@functools.lru_cache(1024)
def check_permutation_by_torch(count: int, dtype: torch.dtype) -> None:
    torch.randperm(count, dtype=dtype, device="cpu", generator=torch.Generator())


# The arguments of an op as the tensor to fill, and the parameters of the distribution


def _target(target: torch.Tensor, *params: Any) -> tuple[torch.Tensor, Params]:
    return target, params


def _like(
    like: torch.Tensor, *params: Any, out: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, Params]:
    return torch.empty_like(like, **options) if out is None else out.resize_(like.shape), params


def _sized(*args: Any, out: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, Params]:
    *params, size = args
    return torch.empty(size, **options) if out is None else out.resize_(size), tuple(params)


def _sized_integers(*args: Any, **options: Any) -> tuple[torch.Tensor, Params]:
    return _sized(*args, **{"dtype": torch.int64} | options)


def _like_below(like: torch.Tensor, high: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Params]:
    return _like(like, int(high), **options)


def _op(method: str, make_target: Callable[..., tuple[torch.Tensor, Params]]) -> RandomFunction:
    def run(key: int, region: Region | None, *args: Any, generator: None = None, **kwargs: Any) -> torch.Tensor:
        target, params = make_target(*args, **kwargs)
        check_by_torch(method, target.dtype, params)
        return fill_random(key, region, target, DISTRIBUTIONS[method](target.dtype, *params))

    return run


# Ops with tensors as parameters, and ops that compute more than random numbers


def _bernoulli_by(make_target: Callable[..., tuple[torch.Tensor, Params]]) -> RandomFunction:
    def run(key: int, region: Region | None, *args: Any, generator: None = None, **kwargs: Any) -> torch.Tensor:
        target, (p,) = make_target(*args, **kwargs)
        limits = torch.stack(p.aminmax()).cpu() if p.numel() else torch.empty(0, dtype=p.dtype)
        torch.empty(limits.shape, dtype=target.dtype).bernoulli_(limits, generator=torch.Generator())
        numbers = torch.empty(target.shape, dtype=torch.float64, device=target.device)
        return target.copy_(fill_random(key, region, numbers, _uniform(torch.float64)) < p.expand(target.shape))

    return run


def _own_probabilities(p: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Params]:
    return _like(p, p, **options)


def _normal_by(
    key: int,
    region: Region | None,
    mean: torch.Tensor | float,
    std: torch.Tensor | float = 1.0,
    generator: None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    size = torch.broadcast_tensors(*tensors)[0].shape
    dtype, device = tensors[0].dtype, tensors[0].device
    target = torch.empty(size, dtype=dtype, device=device) if out is None else out.resize_(size)
    _check_deviations(std)
    check_by_torch("normal_", target.dtype, ())
    return fill_random(key, region, target, _normal(target.dtype)).mul_(std).add_(mean)


def _check_deviations(std: torch.Tensor | float) -> None:
    if not isinstance(std, torch.Tensor):
        check_by_torch("normal_", torch.float32, (0.0, std))
    elif std.numel():
        least = std.reshape(-1)[:1] if std.is_complex() else std.min()
        torch.normal(0.0, least.cpu(), generator=torch.Generator())


def _native_dropout(
    key: int, region: Region | None, input: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    check_by_torch("bernoulli_", torch.bool, (1.0 - p,))
    mask = fill_random(key, region, torch.empty_like(input, dtype=torch.bool), _bernoulli(torch.bool, 1.0 - p))
    return input.mul(mask).mul_(1.0 / (1.0 - p) if p < 1 else 0.0), mask


def _randperm(
    key: int,
    region: Region | None,
    count: int,
    generator: None = None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.int64,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    """The argsort of random bits, which are all different. A part of the result needs all bits."""
    wanted, where = (dtype, device) if out is None else (out.dtype, out.device)
    check_permutation_by_torch(count, wanted)
    bits = torch.empty(count, dtype=torch.int64, device=where)
    fill_random(key, None, bits, Distribution(64, lambda words, real, out: out.copy_(words)))
    ((start, stop),) = (region or whole_region((count,))).box
    order = bits.argsort()[start:stop].to(wanted)
    return order if out is None else out.resize_(order.shape).copy_(order)


def _named(op: str, overloads: str, run: RandomFunction) -> dict[str, RandomFunction]:
    return {f"aten.{op}.{overload}": run for overload in overloads.split()}


def _same_in_all_forms(name: str) -> dict[str, RandomFunction]:
    """The in-place, functional and `out` overloads of an op."""
    return {
        f"aten.{name}_.default": _op(f"{name}_", _target),
        f"aten.{name}.default": _op(f"{name}_", _like),
        f"aten.{name}.out": _op(f"{name}_", _like),
    }


COUNTER_BASED: dict[str, RandomFunction] = {
    **_same_in_all_forms("uniform"),
    **_same_in_all_forms("exponential"),
    **_same_in_all_forms("geometric"),
    **_same_in_all_forms("cauchy"),
    **_same_in_all_forms("log_normal"),
    **_named("normal_", "default", _op("normal_", _target)),
    **_named("normal_functional", "default", _op("normal_", _like)),
    **_named("normal", "out", _op("normal_", _like)),
    **_named("normal", "float_float float_float_out", _op("normal_", _sized)),
    **_named("normal", "Tensor_Tensor Tensor_float float_Tensor", _normal_by),
    **_named("normal", "Tensor_Tensor_out Tensor_float_out float_Tensor_out", _normal_by),
    **_named("bernoulli_", "float", _op("bernoulli_", _target)),
    **_named("bernoulli_", "Tensor", _bernoulli_by(_target)),
    **_named("bernoulli", "p float_out", _op("bernoulli_", _like)),
    **_named("bernoulli", "Tensor Tensor_out", _bernoulli_by(_like)),
    **_named("bernoulli", "default out", _bernoulli_by(_own_probabilities)),
    **_named("random_", "default to from", _op("random_", _target)),
    **_named("random", "default to from out to_out from_out", _op("random_", _like)),
    **_named("rand", "default generator out generator_out", _op("uniform_", _sized)),
    **_named("randn", "default generator out generator_out", _op("normal_", _sized)),
    **_named("randint", "default generator low low_generator", _op("random_", _sized_integers)),
    **_named("randint", "out generator_out low_out low_generator_out", _op("random_", _sized)),
    **_named("rand_like", "default generator out generator_out", _op("uniform_", _like)),
    **_named("randn_like", "default generator out generator_out", _op("normal_", _like)),
    **_named("randint_like", "default generator out generator_out", _op("random_", _like)),
    **_named("randint_like", "low_dtype low_generator_dtype", _op("random_", _like)),
    **_named("randint_like", "low_dtype_out low_generator_dtype_out", _op("random_", _like)),
    **_named("randint_like", "Tensor Tensor_generator Tensor_out Tensor_generator_out", _op("random_", _like_below)),
    **_named("native_dropout", "default", _native_dropout),
    **_named("randperm", "default generator out generator_out", _randperm),
}
"""Functions by overload, which take (key, region, *args, **kwargs)."""
