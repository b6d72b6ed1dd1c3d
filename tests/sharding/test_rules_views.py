"""Views, and ops that repeat or reorder elements, shard by shard."""

from __future__ import annotations

import pytest
import torch

from gt.sharding.op_calls import LocalContext, OpCall
from gt.sharding.rules import lower, rule_of
from gt.sharding.spec import DeviceMesh
from gt.sharding.strategies import FactorSharding, build_strategy
from tests.sharding.expansions import check_expansion
from tests.sharding.samples import numbers
from tests.sharding.simulate import check, encode, flat, meta_of, resolve, rule_for

LINE = [DeviceMesh((2,), ("x",)), DeviceMesh((3,), ("x",))]


@pytest.mark.parametrize("form", ["", "_copy"])
def test_dims_in_another_order(form):
    x = numbers(5, 3, 2)
    check(f"aten.permute{form}.default", x, [2, 0, -2])
    check(f"aten.transpose{form}.int", x, 0, -1)
    check(f"aten.t{form}.default", numbers(5, 3))
    check(f"aten.t{form}.default", numbers(5))
    check(f"aten.unsqueeze{form}.default", x, 1)
    check(f"aten.unsqueeze{form}.default", x, -1)
    check(f"aten.alias{form}.default", x)
    check(f"aten.detach{form}.default", numbers(5, 0))
    check(f"aten.lift_fresh{form}.default", torch.tensor(3.0))


@pytest.mark.parametrize("form", ["", "_copy"])
def test_squeeze_keeps_dims_of_which_a_shard_has_one_element(form):
    x = numbers(2, 1, 3, 1)
    check(f"aten.squeeze{form}.default", x)
    check(f"aten.squeeze{form}.dim", x, -1)
    check(f"aten.squeeze{form}.dim", x, 0)
    check(f"aten.squeeze{form}.dims", x, [0, 1, 3])
    check(f"aten.squeeze{form}.dims", x, [])
    check(f"aten.squeeze{form}.dim", torch.tensor(1.0), -1)


@pytest.mark.parametrize("form", ["", "_copy"])
def test_expand(form):
    check(f"aten.expand{form}.default", numbers(5, 1), [3, 5, 4])
    check(f"aten.expand{form}.default", numbers(1, 3), [2, -1])
    check(f"aten.expand{form}.default", torch.tensor(2.0), [5])
    check(f"aten.expand{form}.default", numbers(1, 3), [0, 3])


def test_complex_views():
    z = torch.randn(5, 3, dtype=torch.complex64)
    for form in ("", "_copy"):
        check(f"aten.view_as_real{form}.default", z)
        check(f"aten.view_as_complex{form}.default", torch.randn(5, 3, 2))
        check(f"aten._conj{form}.default", z)
        check(f"aten._neg_view{form}.default", torch.randn(5, 3))


@pytest.mark.parametrize(("size", "step"), [(3, 1), (2, 2), (2, 3), (1, 1), (7, 1)])
def test_unfold(size, step):
    check("aten.unfold.default", numbers(7, 2), 0, size, step)
    check("aten.unfold_copy.default", numbers(2, 7), -1, size, step)
    windows = torch.zeros(7, 2).unfold(0, size, step)
    check("aten.unfold_backward.default", torch.randn(windows.shape), [7, 2], 0, size, step)


VIEWS = [
    ("aten.view.default", [2, 3, 4]), ("aten.expand.default", [2, 6, 4]), ("aten.permute.default", [1, 0]),
    ("aten.transpose.int", 0, 1), ("aten.t.default",), ("aten.squeeze.dims", [0]), ("aten.unsqueeze.default", 1),
    ("aten.slice.Tensor", 0, 1, 5, 2), ("aten.diagonal.default", 1), ("aten.unfold.default", 0, 2, 1),
    ("aten.alias.default",), ("aten.detach.default",), ("aten.split_with_sizes.default", [1, 2, 3]),
]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_one_view_of_the_shard(view):
    """So that what is written to a part of the view is written to the shard."""
    op, *args = view
    x = numbers(6, 4)
    results = flat(resolve(op)(x, *args))
    call_args = [encode(value, []) for value in args]
    call = OpCall(op, (encode(x, []), *call_args), {}, (meta_of(x),), tuple(map(meta_of, results)))
    rule = rule_of(call)
    for mesh in LINE:
        for name, factor in rule.factors.items():
            sharding = {name: FactorSharding(("x",))}
            strategy = build_strategy(rule, call.shapes, call.result_shapes, mesh, sharding)
            if factor.role in ("pass", "halo") and strategy is not None:
                for worker in mesh.workers:
                    program = lower(LocalContext(call, strategy.operands, strategy.results, worker))
                    assert [local.op for local in program.calls] == [op]


@pytest.mark.parametrize(
    ("shape", "repeats"),
    [
        ((3,), [2]),
        ((5, 2), [1, 3]),
        ((1, 5), [4, 1]),
        ((3, 2), [2, 2, 1]),
        ((2,), [5, 1]),
        ((3,), [0]),
        ((0, 2), [2, 1]),
    ],
)
def test_repeat(shape, repeats):
    x = numbers(*shape)
    if 0 in (*shape, *repeats) and len(shape) == 1:
        assert rule_for("aten.repeat.default", x, repeats) is not None
    else:
        check("aten.repeat.default", x, repeats)


def test_flip_roll_and_rot90_keep_cuts_of_other_dims():
    x = numbers(5, 3, 4)
    check("aten.flip.default", x, [0, -1])
    check("aten.roll.default", x, [2, -1], [0, 1])
    check("aten.rot90.default", x, 1, [0, 2])
    check("aten.rot90.default", x, 2, [1, 2])
    check("aten.rot90.default", x, 4)
    assert str(rule_for("aten.roll.default", x, [1])) == "1 1 1 -> 1 1 1"


@pytest.mark.parametrize(
    ("shifts", "dims", "cut"),
    [([1], [0], "x, -"), ([-2], [0], "x, -"), ([9, 2], [0, -1], "x, -"), ([1, 2], [0, 1], "x, y"), ([1], [1], "y, x")],
)
def test_roll_of_a_cut_dim_joins_two_slices(shifts, dims, cut):
    check_expansion("aten.roll.default", torch.randn(7, 6), shifts, dims, cut=[cut])


def test_roll_moves_only_what_crosses_a_cut():
    moved = check_expansion("aten.roll.default", torch.randn(12, 4), [1], [0], cut=["x, -"])
    assert moved <= 3 * 4 * 4  # a row of four numbers for each worker
