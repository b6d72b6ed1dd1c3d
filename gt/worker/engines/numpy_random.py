"""Random ops on arrays: the bits of `counter_rng.py` computed in NumPy, and the same numbers made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from gt.worker.engines.counter_rng import ROUNDS, Region, key_words, whole_region
from gt.worker.engines.numpy_types import FLOAT32, INT64, Array, NumPyDType, cast
from gt.worker.engines.numpy_views import Sizes
from gt.worker.engines.random_ops import check_by_torch, check_permutation_by_torch


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


RandomOp: TypeAlias = Callable[..., Array]
Sampler: TypeAlias = Callable[[RandomSource, Sizes, NumPyDType], Array]


def _check(method: str, dtype: NumPyDType, *params: float) -> None:
    check_by_torch(method, getattr(torch, dtype.name), params)


# Computed in float64


def _uniform(source: RandomSource, size: Sizes, dtype: NumPyDType) -> Array:
    """Numbers in [0, 1), of as many bits as the dtype has, so that none is rounded to 1."""
    width = np.finfo(dtype).nmant + 1
    return source.words(size, width) * 2.0**-width + 0.5


_inverse = np.vectorize(lambda x: math.copysign(NormalDist().inv_cdf((1 - abs(x)) / 2), x), otypes=[np.float64])


def _normal(source: RandomSource, size: Sizes, dtype: NumPyDType) -> Array:
    return np.asarray(_inverse((source.words(size, 53) + 0.5) * 2.0**-52))


# Ops


def _drawn(method: str, sample: Sampler) -> tuple[RandomOp, RandomOp]:
    """Two factories of random tensors, such as `rand` and `rand_like`."""

    def of_size(source: RandomSource, size: Sizes, dtype: NumPyDType | None = None, **_: object) -> Array:
        _check(method, dtype or FLOAT32)
        if (dtype or FLOAT32).kind == "c":
            raise NotImplementedError("the numpy backend draws no complex numbers; use the pytorch backend")
        return cast(sample(source, size, dtype or FLOAT32), dtype or FLOAT32)

    return of_size, lambda source, like, dtype=None, **_: of_size(source, like.shape, dtype or like.dtype)


_rand, _rand_like = _drawn("uniform_", _uniform)
_randn, _randn_like = _drawn("normal_", _normal)


def _randint(
    source: RandomSource, low: int, high: int, size: Sizes, dtype: NumPyDType | None = None, **_: object
) -> Array:
    _check("random_", dtype or INT64, low, high)
    words, span = source.words(size, 64), high - low
    rest = words % span if span < 2**63 else (words.view(np.uint64) % np.uint64(span)).view(np.int64)
    return cast(rest + low, dtype or INT64)


def _randint_below(source: RandomSource, high: int, size: Sizes, dtype: NumPyDType | None = None, **_: object) -> Array:
    return _randint(source, 0, high, size, dtype)


def _randperm(source: RandomSource, count: int, dtype: NumPyDType | None = None, **_: object) -> Array:
    check_permutation_by_torch(count, getattr(torch, (dtype or INT64).name))
    ((start, stop),) = (source.region or whole_region((count,))).box
    return cast(np.argsort(RandomSource(source.key, None).words((count,), 64))[start:stop], dtype or INT64)


def _uniform_(source: RandomSource, target: Array, low: float = 0.0, high: float = 1.0) -> Array:
    _check("uniform_", target.dtype, low, high)
    rounded = cast(high, target.dtype)
    highest = rounded if float(rounded) < high else np.nextafter(rounded, cast(-np.inf, target.dtype))
    numbers = _uniform(source, target.shape, target.dtype) * (high - low) + low
    numbers = np.minimum(numbers, max(low, float(highest)))
    np.copyto(target, _as_torch_rounds(numbers, target.dtype), casting="same_kind")
    return target


def _as_torch_rounds(numbers: Array, dtype: NumPyDType) -> Array:
    """Torch rounds float64 to float32 on the way to float16, which gives another number once in some thousands."""
    return np.asarray(numbers).astype(np.float32) if dtype == np.float16 else numbers


def _normal_(source: RandomSource, target: Array, mean: float = 0.0, std: float = 1.0) -> Array:
    _check("normal_", target.dtype, mean, std)
    np.copyto(target, _normal(source, target.shape, target.dtype) * std + mean, casting="same_kind")
    return target


def _bernoulli(source: RandomSource, probability: Array) -> Array:
    for limit in (probability.min(initial=0), probability.max(initial=1)):
        _check("bernoulli_", probability.dtype, float(limit))
    return cast(_uniform(source, probability.shape, np.dtype(np.float64)) < probability, probability.dtype)


def _bernoulli_(source: RandomSource, target: Array, probability: float = 0.5) -> Array:
    _check("bernoulli_", target.dtype, probability)
    np.copyto(target, _uniform(source, target.shape, np.dtype(np.float64)) < probability, casting="unsafe")
    return target


RANDOM: dict[str, RandomOp] = {
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
