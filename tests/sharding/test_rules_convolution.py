"""Convolution, shard by shard."""

from __future__ import annotations

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
    assert [name for name, factor in rule.factors.items() if factor.role == HALO] == ["s0", "s1"]


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
    for expanded in expansion.calls:
        args = [decode(value, registers) for value in expanded.args]
        made = flat(resolve(expanded.op)(*args))
        assert [meta_of(value) for value in made] == list(expanded.outputs)
        registers.extend(made)
    for position, value in zip(expansion.results, expected, strict=True):
        torch.testing.assert_close(registers[position], value)
    for expanded in expansion.calls[:2]:
        rule = rule_of(OpCall(expanded.op, expanded.args, {}, call.inputs, expanded.outputs))
        assert rule is not None and {"s0", "s1"} <= rule.factors.keys()


def test_convolution_over_time() -> None:
    check("aten.conv_tbc.default", torch.randn(7, 3, 2), torch.randn(3, 2, 5), torch.randn(5), 1)
