"""Losses, shard by shard."""

from __future__ import annotations

import pytest
import torch

from gt.core.signatures import Input
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from tests.sharding.expansions import TWO, check_expansion
from tests.sharding.simulate import MESHES, check, compare, meta_of, strategies

NLL, NLL_BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"
NLL2D, NLL2D_BACKWARD = "aten.nll_loss2d_forward.default", "aten.nll_loss2d_backward.default"
TARGETS = torch.tensor([4, 0, -100, 2, 3])


@pytest.mark.parametrize("reduction", [0, 2])
@pytest.mark.parametrize("weight", [None, torch.rand(5)])
def test_each_shard_of_classes_picks_its_targets(reduction, weight):
    x = torch.randn(5, 5)
    check(NLL, x, TARGETS, weight, reduction, -100)
    check(NLL, x, TARGETS.clamp(0), weight, reduction, 3)
    check(NLL, x[0], torch.tensor(2), weight, reduction, -100)
    check(NLL, x[:, :2].contiguous(), TARGETS.clamp(0, 1), None, reduction, 1)
    check(NLL, x, TARGETS.clamp(0).to(torch.uint8), weight, reduction, -100)
    image, targets = torch.randn(2, 5, 3, 1), torch.randint(5, (2, 3, 1))
    check(NLL2D, image, targets, weight, reduction, 4)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weight", [None, torch.rand(5)])
def test_gradients_of_targets_go_to_their_classes(reduction, weight):
    x = torch.randn(5, 5)
    gradient = torch.randn(5) if reduction == 0 else torch.randn(())
    total = torch.tensor(3.0)
    check(NLL_BACKWARD, gradient, x, TARGETS, weight, reduction, -100, total)
    check(NLL_BACKWARD, torch.randn(()), x[0], torch.tensor(2), weight, reduction, -100, total)
    image, targets = torch.randn(2, 5, 3, 1), torch.randint(5, (2, 3, 1))
    gradient = torch.randn(2, 3, 1) if reduction == 0 else gradient
    check(NLL2D_BACKWARD, gradient, image, targets, weight, reduction, 4, total)


def test_the_mean_has_the_weight_of_all_targets():
    x, weight = torch.randn(5, 5), torch.rand(5)
    check_expansion(NLL, x, TARGETS, None, 1, -100, cut=["x, -", "x"])
    check_expansion(NLL, x, TARGETS, weight, 1, -100, cut=["-, x", "-", "x"])
    check_expansion(NLL, x, TARGETS, weight, 1, -100, cut=["y, x", "y", "-"])
    check_expansion(NLL, x, torch.full((5,), -100), None, 1, -100, cut=["x, -", "-"])
    check_expansion(
        NLL2D, torch.randn(2, 5, 3, 4), torch.randint(5, (2, 3, 4)), weight, 1, 4, cut=["-, y, x, -", "-, x, -", "y"]
    )


def test_a_target_that_is_no_class_is_an_error_on_shards_too():
    x = torch.randn(5, 4)
    for bad in (4, -1, -7):
        targets = TARGETS.clamp(0, 3)
        targets[1] = bad
        metas = tuple(map(meta_of, (x, targets)))
        outputs = (meta_of(x[0, 0]), meta_of(x[0, 0]))
        call = OpCall(NLL, (Input(0), Input(1), None, 2, -100), {}, metas, outputs)
        for strategy in strategies(rule_of(call), call, TWO):
            with pytest.raises(IndexError, match="out of bounds"):
                compare(call, strategy, [x, targets], [x[0, 0], x[0, 0]], 1e-5)


def test_cross_entropy_with_cut_classes_moves_statistics_only():
    x = torch.randn(40, 300)
    softmax = check_expansion("aten._log_softmax.default", x, 1, False, cut=["-, x"])
    loss = check_expansion(NLL, x, torch.randint(300, (40,)), None, 1, -100, cut=["-, x", "-"])
    assert softmax + loss <= 3 * 4 * 40 * 4


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(5, 3), (1,), (0, 2), ()])
def test_losses(reduction: int, shape: tuple[int, ...]) -> None:
    x, y, g = torch.rand(shape), torch.rand(shape), torch.randn(shape if reduction == 0 else ())
    weight = torch.rand(shape[-1:])
    if shape == ():
        assert rule_of_loss(x, y, reduction) is not None
        return
    if 0 in shape and reduction == 0:
        return
    few = MESHES[1:]
    for op, extra in (("mse_loss", ()), ("smooth_l1_loss", (0.7,)), ("huber_loss", (0.7,)), ("soft_margin_loss", ())):
        check(f"aten.{op}.default", x, y, reduction, *extra, meshes=few)
        if 0 not in shape:
            check(f"aten.{op}_backward.default", g, x, y, reduction, *extra, meshes=few)
    check("aten.binary_cross_entropy.default", x, y, weight.expand(shape).clone(), reduction, meshes=few)
    check("aten.binary_cross_entropy_with_logits.default", x, y, weight, None, reduction, meshes=few)
    check("aten.binary_cross_entropy_with_logits.default", x, y, None, weight, reduction, meshes=few)
    if 0 not in shape:
        check("aten.binary_cross_entropy_backward.default", g, x, y, None, reduction, meshes=few)


def rule_of_loss(x: torch.Tensor, y: torch.Tensor, reduction: int) -> object:
    meta = meta_of(x)
    return rule_of(OpCall("aten.mse_loss.default", (Input(0), Input(1), reduction), {}, (meta, meta), (meta,)))


def test_losses_with_absent_arguments_and_narrow_dtypes() -> None:
    check("aten.mse_loss.default", torch.randn(5), torch.randn(5))
    check("aten.binary_cross_entropy.default", torch.rand(5), torch.rand(5))
    check("aten.mse_loss.default", *[torch.rand(50, 40).mul(100).half() for _ in range(2)], tolerance=1)
    check("aten.mse_loss.default", torch.randn(5, 1), torch.randn(4))
