"""Fused optimizers, shard by shard and tensor by tensor."""

import pytest
import torch

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
