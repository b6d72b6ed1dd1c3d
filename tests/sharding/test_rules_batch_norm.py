"""Batch norm, shard by shard."""

from __future__ import annotations

import pytest
import torch

from gt.core.signatures import Input
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from tests.sharding.expansions import THREE, check_expansion
from tests.sharding.simulate import check, compare, meta_of, resolve, strategies

ALL = [True, True, True]
BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
BATCH_NORM_BACKWARD = "aten.native_batch_norm_backward.default"


def statistics(channels=3):
    return torch.randn(channels), torch.rand(channels)


def batch_norm_gradients(x, weight, train, mask):
    running = statistics(x.shape[1])
    _, mean, scale, *_ = resolve(BATCH_NORM)(x, weight, None, *running, train, 0.1, 1e-5)
    return torch.randn(x.shape), x, weight, *running, mean, scale, train, 1e-5, mask


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_passes_channels(train):
    x, w, b = torch.randn(5, 3, 2), torch.randn(3), torch.randn(3)
    check(BATCH_NORM, x, w, b, *statistics(), train, 0.1, 1e-5)
    check(BATCH_NORM, x[:, :1, 0], None, None, *statistics(1), train, 0.1, 1e-5)
    check(BATCH_NORM_BACKWARD, *batch_norm_gradients(x, w, train, ALL))
    check(BATCH_NORM_BACKWARD, *batch_norm_gradients(x, None, train, [True, False, False]))


def test_other_names_of_batch_norm():
    x, w, b = torch.randn(5, 3, 2), torch.randn(3), torch.randn(3)
    check("aten.native_batch_norm.default", x, w, b, None, None, True, 0.1, 1e-5)
    check("aten._native_batch_norm_legit.no_stats", x, w, b, True, 0.1, 1e-5)
    check("aten._native_batch_norm_legit_no_training.default", x, w, b, *statistics(), 0.1, 1e-5)
    check("aten._batch_norm_with_update_functional.default", x, w, b, *statistics(), 0.1, 1e-5)
    check("aten._batch_norm_no_update.default", x, w, b, *statistics(), 0.1, 1e-5)
    args = batch_norm_gradients(x, w, True, ALL)
    check("aten.batch_norm_backward.default", *args, torch.empty(0, dtype=torch.uint8))


def test_batch_norm_takes_the_statistics_of_the_whole_batch():
    x, w, b = 10 + torch.randn(5, 3, 4), torch.randn(3), torch.randn(3)
    cut = ["-", "-", "-", "-"]
    check_expansion(BATCH_NORM, x, w, b, *statistics(), True, 0.1, 1e-5, cut=["x, -, -", *cut])
    check_expansion(BATCH_NORM, x, w, b, *statistics(), True, 0.1, 1e-5, cut=["y, -, x", *cut])
    check_expansion(BATCH_NORM, x, w, b, *statistics(), True, 0.1, 1e-5, cut=["-, y, x", "y", "-", "y", "-"])
    check_expansion(BATCH_NORM, x, None, None, *statistics(), True, 0.1, 1e-5, cut=["x, -, -", "-", "-"])
    check_expansion("aten._native_batch_norm_legit.no_stats", x, w, b, True, 0.1, 1e-5, cut=["x, -, -", "-", "-"])


def test_batch_norm_backward_takes_the_statistics_of_the_whole_batch():
    x, w = 10 + torch.randn(5, 3, 4), torch.randn(3)
    args = batch_norm_gradients(x, w, True, ALL)
    check_expansion(BATCH_NORM_BACKWARD, *args, cut=["x, -, -", "x, -, -", *["-"] * 5], tolerance=1e-4)
    check_expansion(BATCH_NORM_BACKWARD, *args, cut=["x, y, -", "x, y, -", *["y"] * 5], tolerance=1e-4)
    args = batch_norm_gradients(x, None, True, [True, False, False])
    check_expansion(BATCH_NORM_BACKWARD, *args, cut=["-, -, x", "-, -, x", *["-"] * 4], tolerance=1e-4)


@pytest.mark.parametrize("train", [True, False])
def test_an_op_that_writes_running_statistics_gives_them_as_further_results(train):
    """As the planner calls it; torch itself returns three results."""
    x, (mean, variance) = torch.randn(5, 3, 2), statistics()
    args = (train, 0.1, 1e-5)
    expected = resolve(BATCH_NORM)(x, None, None, mean, variance, *args)
    tensors = [x, mean, variance]
    call = OpCall(
        "aten.native_batch_norm.default",
        (Input(0), None, None, Input(1), Input(2), *args),
        {},
        tuple(map(meta_of, tensors)),
        tuple(map(meta_of, expected)),
    )
    for strategy in strategies(rule_of(call), call, THREE):
        compare(call, strategy, tensors, expected, 1e-5)
