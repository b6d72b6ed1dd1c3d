"""Views and the like, shard by shard."""

import pytest
import torch

from gt.sharding.factors import OpShardingRule
from gt.sharding.op_calls import LocalContext, OpCall
from gt.sharding.propagation import FactorSharding, build_strategy
from gt.sharding.rules import lower, rule_of
from gt.sharding.spec import DeviceMesh
from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check, encode, flat, meta_of, resolve

LINE = [DeviceMesh((2,), ("x",)), DeviceMesh((3,), ("x",))]


def rule_for(op: str, *args: object) -> OpShardingRule | None:
    tensors: list[torch.Tensor] = []
    call_args = tuple([encode(value, tensors) for value in args])
    results = flat(resolve(op)(*args))
    return rule_of(OpCall(op, call_args, {}, tuple(map(meta_of, tensors)), tuple(map(meta_of, results))))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape).float()


# --- Reshape ----------------------------------------------------------------------------------------------------------


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


def test_reshape_of_nothing_is_right_where_nothing_can_be_cut():
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


# --- Views ------------------------------------------------------------------------------------------------------------


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
            if factor.kind in ("pass", "halo") and strategy is not None:
                for worker in mesh.workers:
                    program = lower(LocalContext(call, strategy.operands, strategy.results, worker))
                    assert [local.op for local in program.calls] == [op]


# --- Slices and rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bounds", [(1, 4, 1), (0, 7, 3), (2, 100, 2), (-5, -1, 1), (None, None, 1), (4, 2, 1), (5, 7, 1)]
)
def test_slice_and_its_inverses(bounds):
    x = numbers(7, 3)
    part = torch.ops.aten.slice.Tensor(x, 0, *bounds)
    check("aten.slice.Tensor", x, 0, *bounds)
    check("aten.slice_copy.Tensor", x.t().contiguous(), -1, *bounds)
    check("aten.slice_scatter.default", x, torch.randn_like(part), 0, *bounds)
    if None not in bounds:
        check("aten.slice_backward.default", part, [7, 3], 0, *bounds)


def test_slice_of_other_dtypes_and_narrow():
    check("aten.slice.Tensor", torch.rand(5, 2) > 0.5, 0, 1, 4)
    check("aten.slice.Tensor", numbers(0, 2), 1, 1)
    check("aten.slice.Tensor", numbers(5))
    check("aten.narrow_copy.default", numbers(7, 2), 0, 2, 3)
    check("aten.narrow_copy.default", numbers(2, 7), -1, -4, 3)


@pytest.mark.parametrize("index", [0, 3, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_select_and_its_inverses(index, dtype):
    x = numbers(5, 3).to(dtype)
    check("aten.select.int", x, 0, index)
    check("aten.select_copy.int", x.t().contiguous(), -1, index)
    check("aten.select_backward.default", x[0], [5, 3], 0, index)
    check("aten.select_scatter.default", x, x[0], 0, index)


def test_select_does_not_multiply_what_is_elsewhere():
    check("aten.select.int", torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [3.0, 4.0]]), 0, 0)


@pytest.mark.parametrize(
    "pad", [[1, 2], [0, 0, 3, 1], [-1, 2], [-2, -1], [4, -2, -3, 4], [0, 0], [0, 0, 0, -1], [-3, 3]]
)
def test_constant_pad(pad):
    check("aten.constant_pad_nd.default", numbers(4, 5), pad)
    check("aten.constant_pad_nd.default", numbers(5, 4), pad, 1.5)


def test_constant_pad_of_other_dtypes():
    check("aten.constant_pad_nd.default", torch.rand(2, 3) > 0.5, [1, 1], True)
    check("aten.constant_pad_nd.default", torch.arange(3), [3, 2], 7)
    check("aten.constant_pad_nd.default", numbers(0, 2), [0, 0, 2, 3], 1)


# --- Diagonals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, -2, 4, 9])
def test_diagonals(offset):
    x = numbers(5, 3)
    line = torch.diagonal(x, offset)
    check("aten.diagonal.default", x, offset)
    check("aten.diagonal_copy.default", numbers(3, 2, 5), offset, -1, 0)
    check("aten.diagonal_backward.default", line, [5, 3], offset, 0, 1)
    check("aten.diagonal_scatter.default", x, torch.randn_like(line), offset)
    check("aten.diag_embed.default", numbers(2, 5), offset)
    check("aten.tril.default", numbers(2, 5, 3), offset)
    check("aten.triu.default", x, -offset)


def test_more_diagonals():
    check("aten.diagonal.default", torch.rand(5, 3) > 0.3)
    check("aten.diag_embed.default", numbers(4), 0, 1, 0)
    check("aten.diag_embed.default", numbers(3, 2), -1, 0, 2)
    for dtype in (torch.float32, torch.int32, torch.bfloat16, torch.complex64):
        check("aten.trace.default", torch.arange(12).view(4, 3).to(dtype))
    check("aten.trace.default", numbers(1, 5))
    check("aten.tril.default", torch.ones(4, 5, dtype=torch.bool), 1)


# --- More elements, or the same in another order ----------------------------------------------------------------------


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
