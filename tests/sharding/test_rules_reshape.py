"""Reshapes, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.samples import numbers
from tests.sharding.simulate import check, rule_for


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ((8, 4), (2, 16), "(f0 f1) f2 -> f0 (f1 f2)"),
        ((4, 6), (8, 3), "f0 (f1 f2) -> (f0 f1) f2"),
        ((6, 4), (3, 8), "(f0 f1) f2 -> f0 (f1 f2)"),
        ((2, 3), (3, 2), "p0 p2 -> p1 p3 | whole: p0 p1 p2 p3"),
        ((12, 8), (16, 6), "(f0 p1) (p3 f5) -> (f0 p2) (p4 f5) | whole: p1 p2 p3 p4"),
        ((8,), (2, 4), "(f0 f1) -> f0 f1"),
        ((5, 1, 6), (5, 6, 1), "f0 1 f1 -> f0 f1 1"),
        ((6,), (6,), "f0 -> f0"),
        ((1,), (), "1 -> "),
    ],
)
def test_reshape_finds_the_factors_of_both_shapes(source, target, text):
    assert str(rule_for("aten.view.default", torch.zeros(source), list(target))) == text


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((8, 4), (2, 16)), ((4, 6), (8, 3)), ((6, 4), (3, 8)), ((12, 8), (16, 6)), ((8,), (2, 4)), ((2, 4), (8,)),
        ((5, 3), (15,)), ((5, 3), (5, 1, 3, 1)), ((2, 5, 3), (2, 15)), ((4, 6, 5), (2, 2, 2, 3, 5)), ((1, 7), (7,)),
        ((2, 3, 5), (6, -1)), ((3, 0), (3, 0, 4)), ((7, 4), (7, 2, 2)), ((30,), (5, 2, 3)), ((2, 2, 2, 2), (4, 4)),
    ],
)  # fmt: skip
def test_reshape(source, target):
    for op in ("aten.view.default", "aten._unsafe_view.default", "aten.view_copy.default"):
        check(op, numbers(*source), list(target))


def test_reshape_without_common_factors_cuts_nothing():
    assert str(rule_for("aten.view.default", torch.zeros(0, 4), [2, 0])) == "1 1 -> 1 1"
    assert str(rule_for("aten.view.default", torch.zeros(2, 3), [3, 2])).endswith("whole: p0 p1 p2 p3")


def test_reshape_of_other_dtypes_passes_their_partial_values():
    check("aten.view.default", torch.rand(4, 3) > 0.5, [2, 6])
    check("aten.view.default", torch.arange(12).view(4, 3), [2, 6])
    check("aten.view.default", torch.randn(4, 3, dtype=torch.complex64), [2, 6])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.float64])
def test_view_as_dtype(dtype):
    check("aten.view.dtype", torch.randn(5, 6), dtype)
    check("aten.view_copy.dtype", torch.randn(8), dtype)
