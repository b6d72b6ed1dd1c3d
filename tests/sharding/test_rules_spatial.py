"""Convolution, pooling and resampling, shard by shard."""

import pytest
import torch

from gt.core.signatures import Input
from gt.sharding.factors import HALO
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import entry_of, rule_of
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec
from tests.sharding.simulate import MESHES, check, decode, encode, flat, meta_of, resolve

ONE = MESHES[1:2]
TWO = MESHES[2:]

# batch, channels in and out, input size, kernel, stride, padding, dilation, groups
CONVOLUTIONS = [
    (3, 2, 5, (7,), (3,), 1, 1, 1, 1),
    (2, 4, 2, (9,), (3,), 2, 0, 2, 2),
    (1, 1, 1, (5,), (2,), 3, 4, 1, 1),  # windows in nothing but padding
    (2, 3, 3, (4,), (1,), 1, 0, 1, 3),
    (3, 4, 6, (5, 4), (2, 3), 2, 2, 1, 2),
    (1, 2, 1, (3, 4, 5), (2, 3, 1), 1, 1, 1, 1),
]
TRANSPOSED = [
    (3, 2, 5, (7,), (3,), 1, 1, 1, 1, 0),
    (2, 4, 2, (5,), (3,), 2, 1, 1, 2, 1),
    (2, 2, 4, (4, 5), (3, 2), 1, 0, 2, 1, 0),
    (1, 4, 4, (3, 3), (2, 2), 2, 0, 1, 4, 0),
]


def convolution_args(case: tuple, transposed: bool = False) -> tuple[list[torch.Tensor], list]:
    n, into, out, size, kernel, stride, padding, dilation, groups, *output = case
    channels = (into, out // groups) if transposed else (out, into // groups)
    rank = len(size)
    lists = [[value] * rank for value in (stride, padding, dilation)]
    tensors = [torch.randn(n, into, *size), torch.randn(*channels, *kernel), torch.randn(out)]
    return tensors, [*lists, transposed, [output[0] if output else 0] * rank, groups]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case: tuple) -> None:
    (x, weight, bias), args = convolution_args(case)
    check("aten.convolution.default", x, weight, bias, *args, meshes=MESHES[1:])
    check("aten.convolution.default", x, weight, None, *args, meshes=ONE)


@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolution(case: tuple) -> None:
    (x, weight, bias), args = convolution_args(case, transposed=True)
    check("aten.convolution.default", x, weight, bias, *args, meshes=MESHES[1:])


MASKS = [[True, True, True], [True, False, False], [False, True, True], [False, True, False], [True, True, False]]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("case", "transposed"), [(c, False) for c in CONVOLUTIONS[:6]] + [(c, True) for c in TRANSPOSED]
)
def test_gradients_of_convolution(case: tuple, transposed: bool, mask: list[bool]) -> None:
    (x, weight, bias), args = convolution_args(case, transposed)
    grad = torch.randn_like(torch.convolution(x, weight, bias, *args))
    meshes = TWO if case[0] == 3 else ONE
    check("aten.convolution_backward.default", grad, x, weight, [len(bias)], *args, mask, meshes=meshes, tolerance=1e-3)


def test_spatial_dims_of_a_convolution_are_cut_by_neighbours() -> None:
    x, weight = meta_of(torch.randn(2, 3, 8, 8)), meta_of(torch.randn(4, 3, 3, 3))
    out = meta_of(torch.randn(2, 4, 8, 8))
    lists = [encode([value, value], []) for value in (1, 1, 1)]
    args = (Input(0), Input(1), None, *lists, False, encode([0, 0], []), 1)
    rule = rule_of(OpCall("aten.convolution.default", args, {}, (x, weight), (out,)))
    assert rule is not None
    assert [name for name, factor in rule.factors.items() if factor.kind == HALO] == ["s0", "s1"]


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_computed_apart_where_space_is_cut(transposed: bool) -> None:
    case = (2, 4, 6, (5, 6), (3, 2), 1, 1, 1, 2, 0)
    (x, weight, bias), args = convolution_args(case, transposed)
    grad = torch.randn_like(torch.convolution(x, weight, bias, *args))
    tensors: list[torch.Tensor] = []
    call_args = [encode(value, tensors) for value in (grad, x, weight, [len(bias)], *args, [True, True, True])]
    expected = flat(torch.ops.aten.convolution_backward(grad, x, weight, [len(bias)], *args, [True] * 3))
    op = "aten.convolution_backward.default"
    call = OpCall(op, tuple(call_args), {}, tuple(map(meta_of, tensors)), tuple(map(meta_of, expected)))
    entry = entry_of(op)
    assert entry is not None and entry.expand is not None
    mesh = DeviceMesh((2,), ("x",))
    batched, spatial, whole = (parse_spec(text, mesh) for text in ("x, -, -, -", "-, -, x, -", "-, -, -, -"))
    assert entry.expand(call, [batched, batched, whole]) is None
    expansion = entry.expand(call, [spatial, spatial, whole])
    assert expansion is not None
    registers = list(tensors)
    for piece in expansion.pieces:
        args = [decode(value, registers) for value in piece.args]
        made = flat(resolve(piece.op)(*args))
        assert [meta_of(value) for value in made] == list(piece.outputs)
        registers.extend(made)
    for place, value in zip(expansion.results, expected, strict=True):
        torch.testing.assert_close(registers[place], value)
    for piece in expansion.pieces[:2]:
        rule = rule_of(OpCall(piece.op, piece.args, {}, call.inputs, piece.outputs))
        assert rule is not None and {"s0", "s1"} <= rule.factors.keys()


def test_convolution_over_time() -> None:
    check("aten.conv_tbc.default", torch.randn(7, 3, 2), torch.randn(3, 2, 5), torch.randn(5), 1)


# --- Pooling ----------------------------------------------------------------------------------------------------------

# input size, kernel, stride, padding, ceil_mode
POOLS = [
    ((7, 6), [2, 2], [], 0, False),
    ((7, 6), [3, 2], [2, 1], 1, False),
    ((9, 5), [3, 3], [2, 3], 1, True),
    ((5, 4), [3, 3], [1, 1], 1, True),
    ((8, 3), [5, 3], [3, 1], 1, True),
    ((4, 4), [1, 4], [3, 4], 0, False),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "ceil"), POOLS)
def test_pooling(size: tuple, kernel: list, stride: list, padding: int, ceil: bool) -> None:
    x = torch.randint(0, 5, (2, 3, *size)).float()  # ties
    paddings = [min(padding, width // 2) for width in kernel]
    check("aten.max_pool2d_with_indices.default", x, kernel, stride, paddings, [1, 1], ceil, meshes=MESHES[1:])
    check("aten.avg_pool2d.default", x, kernel, stride, paddings, ceil, True, meshes=ONE)
    check("aten.avg_pool2d.default", x[0].clone(), kernel, stride, paddings, ceil, False, meshes=TWO)
    check("aten.avg_pool2d.default", x, kernel, stride, paddings, ceil, True, 3, meshes=ONE)


def test_pooling_of_windows_with_holes() -> None:
    check("aten.max_pool2d_with_indices.default", torch.randn(1, 2, 9, 8), [2, 3], [2, 1], [1, 1], [3, 2])


def test_pooling_of_infinities_and_nans() -> None:
    x = torch.randn(2, 7, 7)
    x[:, 2:5] = -torch.inf
    x[1, 5] = torch.nan
    check("aten.max_pool2d_with_indices.default", x, [3, 3], [2, 2], [1, 1])
    check("aten.max_pool2d_with_indices.default", torch.full((1, 5, 5), -torch.inf), [2, 2], [1, 1], [1, 1])


def test_pooling_of_volumes() -> None:
    x = torch.randn(2, 1, 5, 4, 3)
    check("aten.max_pool3d_with_indices.default", x, [2, 2, 2], [2, 1, 1], [1, 0, 0], meshes=TWO)
    check("aten.avg_pool3d.default", x, [2, 2, 2], [2, 1, 1], [1, 0, 1], meshes=TWO)


def test_gradients_of_pooling() -> None:
    x = torch.randn(3, 2, 5, 6)
    out, index = torch.ops.aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    grad = torch.randn_like(out)
    check("aten.max_pool2d_with_indices_backward.default", grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index)
    check("aten.avg_pool2d_backward.default", grad, x, [2, 2], [2, 2], [0, 0], False, True, None)
    check("aten.max_unpool2d.default", out, index, [5, 6])
    volume = torch.randn(3, 2, 4, 4, 4)
    out, index = torch.ops.aten.max_pool3d_with_indices(volume, [2] * 3, [2] * 3)
    grad, rest = torch.randn_like(out), ([2] * 3, [2] * 3, [0] * 3)
    check("aten.max_pool3d_with_indices_backward.default", grad, volume, *rest, [1] * 3, False, index)
    check("aten.avg_pool3d_backward.default", grad, volume, *rest, False, True, None)


@pytest.mark.parametrize("rank", [2, 3])
def test_adaptive_pooling(rank: int) -> None:
    for x in (torch.randn(3, 2, *[5] * rank), torch.randn(4, *[5] * rank)):
        out, index = resolve(f"aten.adaptive_max_pool{rank}d.default")(x, [2] * rank)
        check(f"aten._adaptive_avg_pool{rank}d.default", x, [2] * rank)
        check(f"aten.adaptive_max_pool{rank}d.default", x, [2] * rank)
        check(f"aten._adaptive_avg_pool{rank}d_backward.default", torch.randn_like(out), x)
        check(f"aten.adaptive_max_pool{rank}d_backward.default", torch.randn_like(out), x, index)


@pytest.mark.parametrize("rank", [2, 3])
def test_fractional_pooling(rank: int) -> None:
    x, samples = torch.randn(3, 2, *[6] * rank), torch.rand(3, 2, rank)
    lists = [2] * rank, [3] * rank
    check(f"aten.fractional_max_pool{rank}d.default", x, *lists, samples)
    out, index = resolve(f"aten.fractional_max_pool{rank}d.default")(x, *lists, samples)
    check(f"aten.fractional_max_pool{rank}d_backward.default", torch.randn_like(out), x, *lists, index)


# --- Resampling and padding -------------------------------------------------------------------------------------------

UPSAMPLES = [
    ("upsample_nearest1d", 1, ()), ("upsample_linear1d", 1, (False,)), ("_upsample_nearest_exact1d", 1, ()),
    ("upsample_nearest2d", 2, ()), ("upsample_bilinear2d", 2, (True,)), ("upsample_bicubic2d", 2, (False,)),
    ("_upsample_nearest_exact2d", 2, ()), ("_upsample_bilinear2d_aa", 2, (False,)),
    ("_upsample_bicubic2d_aa", 2, (False,)), ("upsample_nearest3d", 3, ()), ("upsample_trilinear3d", 3, (False,)),
    ("_upsample_nearest_exact3d", 3, ()),
]  # fmt: skip


def test_upsampling() -> None:
    for op, rank, args in UPSAMPLES:
        x, size = torch.randn(3, 2, *[4] * rank), [7] * rank
        check(f"aten.{op}.default", x, size, *args, meshes=TWO)
        grad = torch.randn(3, 2, *size)
        check(f"aten.{op}_backward.default", grad, size, list(x.shape), *args, meshes=TWO, tolerance=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_padding(rank: int) -> None:
    x, pads = torch.randn(3, 2, *[4] * rank), [1, 2] * rank
    for kind in ("reflection", "replication"):
        check(f"aten.{kind}_pad{rank}d.default", x, pads)
        grad = torch.randn(3, 2, *[7] * rank)
        check(f"aten.{kind}_pad{rank}d_backward.default", grad, x, pads)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("mode", [0, 1])
def test_sampling_by_a_grid(rank: int, mode: int) -> None:
    x, grid = torch.randn(2, 3, *[4] * rank), torch.rand(2, *[5, 3, 2][:rank], rank) * 2 - 1
    check(f"aten.grid_sampler_{rank}d.default", x, grid, mode, 0, False, meshes=TWO)
    grad = torch.randn(2, 3, *grid.shape[1:-1])
    args = (grad, x, grid, mode, 0, False)
    check(f"aten.grid_sampler_{rank}d_backward.default", *args, [True, True], meshes=TWO)
    check(f"aten.grid_sampler_{rank}d_backward.default", *args, [False, True], meshes=ONE)


def test_grids_of_affine_maps() -> None:
    check("aten.affine_grid_generator.default", torch.randn(3, 2, 3), [3, 1, 4, 5], False)
    check("aten.affine_grid_generator.default", torch.randn(3, 3, 4), [3, 1, 4, 5, 2], True)


@pytest.mark.parametrize("shape", [(2, 12, 5, 3), (8, 2, 3), (1, 4, 1, 2)])
def test_shuffling_pixels(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    check("aten.pixel_shuffle.default", x, 2)
    check("aten.pixel_unshuffle.default", torch.pixel_shuffle(x, 2).contiguous(), 2)
    if len(shape) == 4:
        check("aten.channel_shuffle.default", x, 2)


@pytest.mark.parametrize("shape", [(3, 2, 5, 4), (2, 5, 4), (2, 1, 3, 3)])
def test_columns_of_windows(shape: tuple[int, ...]) -> None:
    x, rest = torch.randn(shape), ([2, 3], [1, 1], [1, 0], [2, 1])
    check("aten.im2col.default", x, *rest)
    columns = torch.ops.aten.im2col(x, *rest)
    check("aten.col2im.default", columns, list(shape[-2:]), *rest)
