"""Ops that make arrays. Layouts, devices and memory formats are taken and ignored; empty ones are zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from gt.worker.engines.numpy_types import (
    FLOAT32,
    INT64,
    Array,
    Kind,
    Operand,
    cast,
    dtype_of_number,
    promote,
    store,
)
from gt.worker.engines.numpy_views import Shape, empty_strided

Factory: TypeAlias = Callable[..., Array]
Generator: TypeAlias = np.random.Generator
Fill: TypeAlias = Callable[[Generator, Shape, Kind], Array]


def _full(size: Shape, value: Operand, dtype: Kind | None = None, **_: object) -> Array:
    return np.full(size, cast(value, dtype or dtype_of_number(value)))


def _full_like(like: Array, value: Operand, dtype: Kind | None = None, **_: object) -> Array:
    return np.full_like(like, cast(value, dtype or like.dtype), dtype)


def _new_full(like: Array, size: Shape, value: Operand, dtype: Kind | None = None, **_: object) -> Array:
    return np.full(size, cast(value, dtype or like.dtype))


def _filled_with(value: int) -> tuple[Factory, Factory, Factory]:
    """The three factories of a constant: by size, like a tensor, and by size with the dtype of a tensor."""
    return (
        lambda size, dtype=FLOAT32, **_: _full(size, value, dtype or FLOAT32),
        lambda like, dtype=None, **_: _full_like(like, value, dtype),
        lambda like, size, dtype=None, **_: _new_full(like, size, value, dtype),
    )


_zeros, _zeros_like, _new_zeros = _filled_with(0)
_ones, _ones_like, _new_ones = _filled_with(1)


def _empty_strided(size: Shape, strides: Shape, dtype: Kind | None = None, **_: object) -> Array:
    result = empty_strided(size, strides, dtype or FLOAT32)
    result.fill(0)
    return result


def _arange(start: float, end: float, step: float = 1, dtype: Kind | None = None, **_: object) -> Array:
    count = math.ceil((end - start) / step)
    return (np.arange(count) * step + start).astype(dtype or promote([dtype_of_number(n) for n in (start, end, step)]))


def _eye(rows: int, columns: int | None = None, dtype: Kind | None = None, **_: object) -> Array:
    return np.eye(rows, columns, dtype=dtype or FLOAT32)


def _linspace(start: float, end: float, steps: int, dtype: Kind | None = None, **_: object) -> Array:
    return np.linspace(start, end, steps).astype(dtype or FLOAT32)


def _uniform(rng: Generator, size: Shape, dtype: Kind) -> Array:
    """In [0, 1) for every float dtype: as many random bits as it has, so that rounding cannot give 1."""
    bits = np.finfo(dtype).nmant + 1
    return cast(rng.integers(1 << bits, size=tuple(size)) / (1 << bits), dtype)


def _normal(rng: Generator, size: Shape, dtype: Kind) -> Array:
    return cast(rng.standard_normal(tuple(size)), dtype)


def _drawn(fill: Fill) -> tuple[Factory, Factory]:
    """Two factories of random tensors: by size, and like a tensor."""
    return (
        lambda rng, size, dtype=None, **_: fill(rng, size, dtype or FLOAT32),
        lambda rng, like, dtype=None, **_: fill(rng, like.shape, dtype or like.dtype),
    )


_rand, _rand_like = _drawn(_uniform)
_randn, _randn_like = _drawn(_normal)


def _randint(rng: Generator, low: int, high: int, size: Shape, dtype: Kind | None = None, **_: object) -> Array:
    return cast(rng.integers(low, high, tuple(size)), dtype or INT64)


def _randint_below(rng: Generator, high: int, size: Shape, dtype: Kind | None = None, **_: object) -> Array:
    return _randint(rng, 0, high, size, dtype)


def _randperm(rng: Generator, count: int, dtype: Kind | None = None, **_: object) -> Array:
    return cast(rng.permutation(count), dtype or INT64)


def _uniform_(rng: Generator, target: Array, low: float = 0.0, high: float = 1.0) -> Array:
    return store(target, _uniform(rng, target.shape, target.dtype) * cast(high - low, target.dtype) + low)


def _normal_(rng: Generator, target: Array, mean: float = 0.0, std: float = 1.0) -> Array:
    return store(target, _normal(rng, target.shape, target.dtype) * cast(std, target.dtype) + mean)


def _bernoulli(rng: Generator, probability: Array) -> Array:
    return cast(rng.random(probability.shape) < probability, probability.dtype)


def _bernoulli_(rng: Generator, target: Array, probability: float = 0.5) -> Array:
    np.copyto(target, rng.random(target.shape) < probability, casting="unsafe")
    return target


FACTORIES: dict[str, Factory] = {
    "aten.empty.memory_format": _zeros,
    "aten.empty_strided.default": _empty_strided,
    "aten.empty_like.default": _zeros_like,
    "aten.zeros.default": _zeros,
    "aten.zeros_like.default": _zeros_like,
    "aten.new_zeros.default": _new_zeros,
    "aten.new_empty.default": _new_zeros,
    "aten.ones.default": _ones,
    "aten.ones_like.default": _ones_like,
    "aten.new_ones.default": _new_ones,
    "aten.full.default": _full,
    "aten.scalar_tensor.default": lambda value, dtype=None, **_: _full((), value, dtype or FLOAT32),
    "aten.full_like.default": _full_like,
    "aten.new_full.default": _new_full,
    "aten.arange.default": lambda end, **options: _arange(0, end, **options),
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.eye.default": _eye,
    "aten.eye.m": _eye,
    "aten.linspace.default": _linspace,
}

# These take their generator first.
RANDOM: dict[str, Factory] = {
    "aten.rand.default": _rand,
    "aten.rand.generator": _rand,
    "aten.rand_like.default": _rand_like,
    "aten.randn.default": _randn,
    "aten.randn.generator": _randn,
    "aten.randn_like.default": _randn_like,
    "aten.randint.default": _randint_below,
    "aten.randint.low": _randint,
    "aten.randperm.default": _randperm,
    "aten.uniform_.default": _uniform_,
    "aten.normal_.default": _normal_,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli_.float": _bernoulli_,
}
