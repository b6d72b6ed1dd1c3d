"""Arguments for every counter-based random op, and functions that draw with them."""

import math
from unittest import mock

import torch
from hypothesis import strategies as st

from gt.worker.engines import NumPyEngine, PyTorchEngine, counter_rng
from gt.worker.engines.counter_rng import Distribution, Region, fill_random

ENGINE, REFERENCE = PyTorchEngine("cpu"), NumPyEngine()
BITS = Distribution(64, lambda words, real, out: out.copy_(words))
COUNT = 100_000
KEYS = st.integers(0, 2**63 - 1)


def draw(op, key, *args, region=None, engine=ENGINE, **kwargs):
    return engine.seeded(op, engine.resolve(op), region)(key, *args, **kwargs)


def bits(key, *shape, region=None):
    return fill_random(key, region, torch.empty(shape, dtype=torch.int64), BITS)


def zeros(shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


# Arguments of each op for a tensor of a shape: `part` cuts what belongs to the region out of tensors of the whole.
TARGET = {
    "uniform_.default": (-1.0, 3.0),
    "normal_.default": (1.0, 2.0),
    "log_normal_.default": (),
    "exponential_.default": (2.0,),
    "geometric_.default": (0.3,),
    "cauchy_.default": (),
    "bernoulli_.float": (0.3,),
    "random_.default": (),
    "random_.to": (7,),
    "random_.from": (-3, 7),
}
FUNCTIONS = {
    "uniform": "default out", "log_normal": "default out", "exponential": "default out", "cauchy": "default out",
    "normal_functional": "default", "normal": "out", "rand_like": "default generator out generator_out",
    "randn_like": "default generator out generator_out", "random": "default out",
}  # fmt: skip
NUMBERED = {
    "geometric": ("default out", (0.3,)),
    "bernoulli": ("p float_out", (0.3,)),
    "random": ("to to_out", (9,)),
    "randint_like": ("default generator out generator_out", (9,)),
}
SIZED = {
    "rand.default": (), "rand.generator": (), "rand.out": (), "rand.generator_out": (), "randn.default": (),
    "randn.generator": (), "randn.out": (), "randn.generator_out": (), "randint.default": (9,),
    "randint.generator": (9,), "randint.out": (9,), "randint.generator_out": (9,), "randint.low": (-4, 9),
    "randint.low_generator": (-4, 9), "randint.low_out": (-4, 9), "randint.low_generator_out": (-4, 9),
    "normal.float_float": (1.0, 2.0), "normal.float_float_out": (1.0, 2.0),
}  # fmt: skip
BETWEEN = {
    "random": "from from_out",
    "randint_like": "low_dtype low_generator_dtype low_dtype_out low_generator_dtype_out",
}


def spread(shape):
    return torch.linspace(0, 1, math.prod(shape)).reshape(shape)


def cases():
    for name, params in TARGET.items():
        yield name, lambda shape, part, params=params: (part(zeros(shape)), *params)
    for name, params in SIZED.items():
        yield name, lambda shape, part, params=params: (*params, list(part(zeros(shape)).shape))
    for op, overloads in FUNCTIONS.items():
        for overload in overloads.split():
            yield f"{op}.{overload}", lambda shape, part: (part(zeros(shape)),)
    for op, (overloads, params) in NUMBERED.items():
        for overload in overloads.split():
            yield f"{op}.{overload}", lambda shape, part, params=params: (part(zeros(shape)), *params)
    for op, overloads in BETWEEN.items():
        for overload in overloads.split():
            yield f"{op}.{overload}", lambda shape, part: (part(zeros(shape)), -4, 9)
    for overload in ("Tensor", "Tensor_generator", "Tensor_out", "Tensor_generator_out"):
        yield f"randint_like.{overload}", lambda shape, part: (part(zeros(shape)), torch.tensor(9))
    for name in ("bernoulli_.Tensor", "bernoulli.Tensor", "bernoulli.Tensor_out"):
        yield name, lambda shape, part: (part(zeros(shape)), part(spread(shape)))
    for name in ("bernoulli.default", "bernoulli.out"):
        yield name, lambda shape, part: (part(spread(shape)),)
    for suffix in ("", "_out"):
        yield f"normal.Tensor_Tensor{suffix}", lambda shape, part: (part(spread(shape)), part(spread(shape)))
        yield f"normal.Tensor_float{suffix}", lambda shape, part: (part(spread(shape)), 2.0)
        yield f"normal.float_Tensor{suffix}", lambda shape, part: (1.0, part(spread(shape)))
    yield "native_dropout.default", lambda shape, part: (part(spread(shape)), 0.4, True)


CASES = {f"aten.{name}": arguments for name, arguments in cases()}
PERMUTATIONS = {f"aten.randperm.{name}" for name in ("default", "generator", "out", "generator_out")}


def made(op, key, shape, part, region=None):
    """All results of an op, stacked into one tensor; ops with `out` get a tensor to write to."""
    out = {"out": part(zeros(shape))} if op.endswith("out") else {}
    results = draw(op, key, *CASES[op](shape, part), region=region, **out)
    return torch.stack([result.double() for result in (results if isinstance(results, tuple) else [results])], -1)


@st.composite
def regions(draw):
    shape = draw(st.lists(st.integers(1, 8), max_size=4))
    stops = [size - draw(st.integers(0, size)) for size in shape]
    return Region(tuple(shape), tuple([(draw(st.integers(0, stop)), stop) for stop in stops]))


def cut(region):
    return tuple(slice(start, stop) for start, stop in region.box)


def in_pieces(share):
    return mock.patch.multiple(counter_rng, _SHARE_OF_A_THREAD=share)


def farthest(numbers, cumulative):
    """The statistic of Kolmogorov and Smirnov, times the root of the count: above 1.95 once in a thousand times."""
    expected = cumulative(numbers.double().sort().values)
    steps = torch.arange(len(numbers) + 1) / len(numbers)
    return max((steps[1:] - expected).max().item(), (expected - steps[:-1]).max().item()) * math.sqrt(len(numbers))


def chi_squared(counts, expected):
    """How many standard deviations the statistic is away from what it should be."""
    found = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    return (found - freedom) / math.sqrt(2 * freedom)
