"""Random ops on arrays: the bits of `counter_rng.py` computed in NumPy, and the same numbers made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch

from gt.worker.engines.counter_rng import ROUNDS, Region, key_words, whole_region
from gt.worker.engines.numpy_arrays import FLOAT16, FLOAT32, FLOAT64, INT64, Array, NumPyDType, Sizes, cast
from gt.worker.engines.random_ops import check_by_torch, check_permutation_by_torch

_inverse = np.vectorize(lambda x: math.copysign(NormalDist().inv_cdf((1 - abs(x)) / 2), x), otypes=[np.float64])


class RandomSource(NamedTuple):
    """The first argument of a random op: its key, and the part of the whole tensor to compute."""

    key: int
    region: Region | None

    def words(self, size: Sizes, width: int) -> Array:
        """Signed integers of `width` random bits."""
        region = self.region or whole_region(tuple(size))
        assert region.size == tuple(size), f"{region} is not of the size {size}"
        index: Array = np.zeros(1, np.uint64)
        for count, (begin, end) in zip(region.shape, region.box, strict=True):
            index = index[..., None] * np.uint64(count) + np.arange(begin, end, dtype=np.uint64)
        start, step = key_words(self.key)
        words = index.reshape(-1) * np.uint64(step) + np.uint64(start)
        for shift, factor in ROUNDS:
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
        return (words.view(np.int64) >> (64 - width)).reshape(tuple(size))

    def uniform(self, size: Sizes, dtype: NumPyDType = FLOAT64) -> Array:
        """Numbers in [0, 1), of as many bits as the dtype has, so that none is rounded to 1."""
        width = np.finfo(dtype).nmant + 1
        return self.words(size, width) * 2.0**-width + 0.5


def _check(method: str, dtype: NumPyDType, *params: float) -> None:
    check_by_torch(method, getattr(torch, dtype.name), params)
    if dtype.kind == "c":
        raise NotImplementedError("the numpy backend draws no complex numbers; use the pytorch backend")


def _store(target: Array, numbers: Array) -> Array:
    """Torch rounds float64 to float32 on the way to float16, which gives another number once in some thousands."""
    np.copyto(target, cast(numbers, FLOAT32) if target.dtype == FLOAT16 else numbers, casting="same_kind")
    return target


def _uniform_(source: RandomSource, target: Array, low: float = 0.0, high: float = 1.0) -> Array:
    _check("uniform_", target.dtype, low, high)
    rounded = cast(high, target.dtype)
    highest = rounded if float(rounded) < high else np.nextafter(rounded, cast(-np.inf, target.dtype))
    numbers = source.uniform(target.shape, target.dtype) * (high - low) + low
    return _store(target, np.minimum(numbers, max(low, float(highest))))


def _normal_(source: RandomSource, target: Array, mean: float = 0.0, std: float = 1.0) -> Array:
    _check("normal_", target.dtype, mean, std)
    return _store(target, _inverse((source.words(target.shape, 53) + 0.5) * 2.0**-52) * std + mean)


def _randint(
    source: RandomSource, low: int, high: int, size: Sizes, dtype: NumPyDType | None = None, **_: object
) -> Array:
    _check("random_", dtype or INT64, low, high)
    words, span = source.words(size, 64), high - low
    rest = words % span if span < 2**63 else (words.view(np.uint64) % np.uint64(span)).view(np.int64)
    return cast(rest + low, dtype or INT64)


def _randperm(source: RandomSource, count: int, dtype: NumPyDType | None = None, **_: object) -> Array:
    check_permutation_by_torch(count, getattr(torch, (dtype or INT64).name))
    ((start, stop),) = (source.region or whole_region((count,))).box
    return cast(np.argsort(RandomSource(source.key, None).words((count,), 64))[start:stop], dtype or INT64)


def _bernoulli(source: RandomSource, probability: Array) -> Array:
    for limit in (probability.min(initial=0), probability.max(initial=1)):
        _check("bernoulli_", probability.dtype, float(limit))
    return cast(source.uniform(probability.shape) < probability, probability.dtype)


def _bernoulli_(source: RandomSource, target: Array, probability: float = 0.5) -> Array:
    _check("bernoulli_", target.dtype, probability)
    np.copyto(target, source.uniform(target.shape) < probability, casting="unsafe")
    return target


def _factories(name: str, fill: Callable[[RandomSource, Array], Array]) -> dict[str, Callable[..., Any]]:
    def of_size(source: RandomSource, size: Sizes, dtype: NumPyDType | None = None, **_: object) -> Array:
        return fill(source, np.empty(size, dtype or FLOAT32))

    return {
        f"aten.{name}.default": of_size,
        f"aten.{name}.generator": of_size,
        f"aten.{name}_like.default": lambda source, like, dtype=None, **_: of_size(
            source, like.shape, dtype or like.dtype
        ),
    }


RANDOM: dict[str, Callable[..., Any]] = {
    **_factories("rand", _uniform_),
    **_factories("randn", _normal_),
    "aten.randint.default": lambda source, high, size, **options: _randint(source, 0, high, size, **options),
    "aten.randint.low": _randint,
    "aten.randperm.default": _randperm,
    "aten.uniform_.default": _uniform_,
    "aten.normal_.default": _normal_,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli_.float": _bernoulli_,
}
