"""Floats that remember how they were computed from arguments."""

import math

import pytest
import torch

from gt.client.compilation.traced_floats import FloatTrace


@pytest.mark.parametrize("compute", [
    lambda x: -x, lambda x: 1 - x, lambda x: x * x + 2, lambda x: 2**x, lambda x: abs(x) / 3, lambda x: 7 % x,
])  # fmt: skip
def test_arithmetic_is_repeated_for_other_values(compute):
    trace = FloatTrace([0.3])
    result = compute(trace.traced[0])
    assert float(result.pin()) == compute(0.3)
    assert trace.expressions[-1]([0.7]) == compute(0.7)


@pytest.mark.parametrize("use", [
    lambda x: x > 0.5, lambda x: x == 0.5, bool, int, round, str, hash, math.floor, lambda x: f"{x}", lambda x: {x: 1},
])  # fmt: skip
def test_code_that_may_branch_pins_the_argument(use):
    trace = FloatTrace([0.3, 0.4])
    use(1 - trace.traced[1])
    assert trace.pinned == {1}


def test_torch_takes_traced_floats_and_gives_tensors():
    traced = FloatTrace([0.5]).traced[0]
    x = torch.ones(2)
    assert (x * traced).tolist() == (traced * x).tolist() == [0.5, 0.5]
    assert x.add(x, alpha=traced).tolist() == [1.5, 1.5]
    assert not traced.trace.pinned
