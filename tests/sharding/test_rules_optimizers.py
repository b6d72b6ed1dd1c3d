"""Fused optimizers, shard by shard and tensor by tensor, and the layouts of pointwise ops on lists."""

import pytest
import torch

from gt.core.signatures import Input, ListArg
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import entry_of
from gt.sharding.rules.support.expansion_builder import contiguous_meta
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec
from gt.sharding.strategies import OpOperand
from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check

ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {
    "weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False,
    "is_first_step": False,
}  # fmt: skip
ADAGRAD = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
SHAPES = [(5, 4), (7,)]


def like(shapes, count: int) -> list[list[torch.Tensor]]:
    return [[torch.rand(shape) for shape in shapes] for _ in range(count)]


def steps(count: int) -> list[torch.Tensor]:
    return [torch.tensor(3.0) for _ in range(count)]


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam(name, amsgrad):
    op, options = f"aten._fused_{name}.default", ADAM | {"amsgrad": amsgrad}
    lists = like(SHAPES[:1], 5) if amsgrad else [*like(SHAPES[:1], 4), []]
    check(op, *lists, steps(1), **options)
    both = like(SHAPES, 5) if amsgrad else [*like(SHAPES, 4), []]
    cut = [*["x, -", "x"] * (5 if amsgrad else 4), "", ""]
    assert check_expansion(op, *both, steps(2), cut=cut, **options) == 0


def test_sgd_and_adagrad():
    check("aten._fused_sgd.default", *like(SHAPES[:1], 3), **SGD)
    assert check_expansion("aten._fused_sgd.default", *like(SHAPES, 3), cut=["-, x", "x"] * 3, **SGD) == 0
    check("aten._fused_adagrad.default", *like(SHAPES[:1], 3), steps(1), **ADAGRAD)


@pytest.mark.parametrize("last", [1.0, torch.inf, torch.nan])
def test_unscaling_finds_what_is_infinite(last):
    op, gradients = "aten._amp_foreach_non_finite_check_and_unscale.default", like(SHAPES, 1)[0]
    gradients[0][-1, -1] = last
    found, scale = torch.zeros(()), torch.tensor(0.5)
    check(op, gradients[:1], found, scale)
    check_expansion(op, gradients, found, scale, cut=["x, -", "x", "", ""])


X, Y = DeviceMesh((2,), ("x",)), DeviceMesh((2,), ("x",), (2, 3))


def lay_out(operands: str, targets: str = "", shapes=((6, 4), (6, 4), (6, 4))) -> str | None:
    """The layouts of three tensors at one position of three lists, and of the result."""
    metas = [contiguous_meta(shape, "float32") for shape in shapes]
    lists = [ListArg((Input(position),)) for position in range(len(metas))]
    call = OpCall("aten._foreach_addcdiv.Scalar", tuple(lists), {}, tuple(metas), (metas[0],))
    specs = [
        parse_spec(text.strip().removeprefix("other "), Y if "other" in text else X) for text in operands.split("/")
    ]
    given = [OpOperand(meta.shape, 4, spec) for meta, spec in zip(metas, specs, strict=True)]
    entry = entry_of(call.op)
    strategy = entry.lay_out(call, given, [parse_spec(targets, X) if targets else None], X)
    return strategy and " / ".join(map(str, (*strategy.operands, *strategy.results)))


@pytest.mark.parametrize(
    ("operands", "target", "layouts"),
    [
        ("x, - / x, - / x, -", "", "x, - / x, - / x, - / x, -"),
        ("-, - / x, - / x, -", "", "x, - / x, - / x, - / x, -"),  # cutting a copy moves nothing
        ("-, - / x, - / x, -", "-, -", "-, - / -, - / -, - / -, -"),  # the written tensor keeps its layout
        ("x, - / -, - + x / x, -", "", "x, - / x, - / x, - / x, -"),  # a partial one is reduced
        ("other x, - / -, x / other -, -", "", "-, x / -, x / -, x / -, x"),
    ],
)
def test_tensors_at_one_position_of_lists_have_one_layout(operands, target, layouts):
    assert lay_out(operands, target) == layouts


def test_a_partial_tensor_is_not_written():
    assert lay_out("-, - + x / x, - / x, -", "-, - + x") is None


def test_tensors_of_other_shapes_are_whole():
    assert lay_out("x, - / x / x, -", shapes=((6, 4), (4,), (6, 4))) == "-, - / - / -, - / -, -"
