from __future__ import annotations

import math

import pytest
import torch

from gt.core.signatures import Input
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from tests.sharding.expansions import THREE, TWO, check_expansion
from tests.sharding.simulate import check, compare, meta_of, resolve, strategies

INF = math.inf
ALL = [True, True, True]

# --- Softmax ----------------------------------------------------------------------------------------------------------

SOFTMAX = ["aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default"]


def softmax_args(op, dim):
    return (dim,) if "safe" in op else (dim, False)


@pytest.mark.parametrize("op", SOFTMAX)
def test_softmax_passes_other_dims(op):
    check(op, torch.randn(5, 3, 2), *softmax_args(op, 1))
    check(op, torch.randn(5, 1), *softmax_args(op, -1))


@pytest.mark.parametrize("op", SOFTMAX)
def test_softmax_over_a_cut_dim(op):
    x = torch.randn(5, 4) * 50
    check_expansion(op, x, *softmax_args(op, 0), cut=["x, -"])
    check_expansion(op, x, *softmax_args(op, -1), cut=["x, y"])
    check_expansion(op, x, *softmax_args(op, -1), cut=["-, x y"])
    odd = torch.tensor([[1, INF, -INF, 0], [2, -INF, -INF, 1e30], [3, 0, -INF, -1e30]])
    check_expansion(op, odd, *softmax_args(op, 0), cut=["x, -"])
    check_expansion(op, x.bfloat16(), *softmax_args(op, 0), cut=["x, -"], tolerance=1e-2)


def test_safe_softmax_to_another_dtype():
    check_expansion("aten._safe_softmax.default", torch.randn(5, 4), 0, torch.float64, cut=["x, -"])


@pytest.mark.parametrize("op", ["aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default"])
def test_softmax_backward(op):
    gradient, x = torch.randn(5, 4), torch.randn(5, 4)
    output = x.softmax(0) if "log" not in op else x.log_softmax(0)
    check(op, gradient, output, 0, torch.float32)
    check_expansion(op, gradient, output, 0, torch.float32, cut=["x, -", "x, -"])
    check_expansion(op, gradient, output, -2, torch.float32, cut=["x, y", "x, y"])


def test_softmax_moves_statistics_only():
    x = torch.randn(30, 100)
    assert check_expansion("aten._softmax.default", x, 0, False, cut=["x, -"]) <= 2 * 4 * 100 * 4


# --- Layer norm -------------------------------------------------------------------------------------------------------

LAYER_NORM = "aten.native_layer_norm.default"
LAYER_NORM_BACKWARD = "aten.native_layer_norm_backward.default"


def layer_norm_gradients(x, shape, weight, bias, mask):
    _, mean, rstd = resolve(LAYER_NORM)(x, shape, weight, bias, 1e-5)
    return torch.randn(x.shape, dtype=x.dtype), x, shape, mean, rstd, weight, bias, mask


def test_layer_norm_passes_the_dims_before():
    w, b = torch.randn(4), torch.randn(4)
    check(LAYER_NORM, torch.randn(5, 2, 4), [4], w, b, 1e-5)
    check(LAYER_NORM, torch.randn(5, 4), [4], None, b, 1e-5)
    check(LAYER_NORM, torch.randn(1, 2, 4), [2, 4], None, None, 1e-5)
    check(LAYER_NORM_BACKWARD, *layer_norm_gradients(torch.randn(5, 2, 4), [4], w, b, ALL))
    check(LAYER_NORM_BACKWARD, *layer_norm_gradients(torch.randn(5, 4), [4], w, None, [True, True, False]))
    check(LAYER_NORM_BACKWARD, *layer_norm_gradients(torch.randn(2, 4), [4], None, None, [True, False, False]))


def test_layer_norm_over_cut_dims():
    w, b = torch.randn(2, 5), torch.randn(2, 5)
    x = 10 + torch.randn(3, 2, 5)
    check_expansion(LAYER_NORM, x, [5], w[0], b[0], 1e-5, cut=["-, -, x", "x", "x"])
    check_expansion(LAYER_NORM, x, [2, 5], w, b, 1e-5, cut=["x, -, y", "-, -", "-, -"])
    check_expansion(LAYER_NORM, x, [2, 5], w, None, 1e-5, cut=["-, x, -", "x, -"])
    check_expansion(LAYER_NORM, x.bfloat16(), [5], None, None, 1e-5, cut=["-, -, x"], tolerance=3e-2)


def test_layer_norm_backward_over_cut_dims():
    w, b = torch.randn(5), torch.randn(5)
    x = 10 + torch.randn(3, 2, 5)
    args = layer_norm_gradients(x, [5], w, b, ALL)
    cut = ["-, -, x", "-, -, x", "-, -, -", "-, -, -", "x", "x"]
    check_expansion(LAYER_NORM_BACKWARD, *args, cut=cut, tolerance=1e-4)
    check_expansion(LAYER_NORM_BACKWARD, *args, cut=["y, -, x", "y, -, x", *cut[2:]], tolerance=1e-4)
    args = layer_norm_gradients(x, [5], None, b, [True, False, True])
    check_expansion(LAYER_NORM_BACKWARD, *args, cut=cut[:5], tolerance=1e-4)
    args = layer_norm_gradients(x[0, 0], [5], w, b, ALL)
    check_expansion(LAYER_NORM_BACKWARD, *args, cut=["x", "x", "-", "-", "x", "x"], tolerance=1e-4)


# --- Group norm -------------------------------------------------------------------------------------------------------

GROUP_NORM = "aten.native_group_norm.default"
GROUP_NORM_BACKWARD = "aten.native_group_norm_backward.default"


def sizes(x, group):
    return (x.shape[0], x.shape[1], math.prod(x.shape[2:]), group)


def group_norm_gradients(x, weight, group, mask):
    _, mean, rstd = resolve(GROUP_NORM)(x, weight, None, *sizes(x, group), 1e-5)
    return torch.randn(x.shape), x, mean, rstd, weight, *sizes(x, group), mask


@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_group_norm_passes_batch_and_groups(group):
    x, w, b = torch.randn(5, 6, 4), torch.randn(6), torch.randn(6)
    check(GROUP_NORM, x, w, b, *sizes(x, group), 1e-5)
    check(GROUP_NORM, x, None, None, *sizes(x, group), 1e-5)
    check(GROUP_NORM_BACKWARD, *group_norm_gradients(x, w, group, ALL))
    check(GROUP_NORM_BACKWARD, *group_norm_gradients(x, None, group, [True, False, False]))


@pytest.mark.parametrize("group", [1, 2, 6])
def test_group_norm_over_cut_dims(group):
    x, w, b = 10 + torch.randn(3, 6, 4, 2), torch.randn(6), torch.randn(6)
    check_expansion(GROUP_NORM, x, w, b, *sizes(x, group), 1e-5, cut=["-, -, x, -", "-", "-"])
    check_expansion(GROUP_NORM, x, None, b, *sizes(x, group), 1e-5, cut=["y, -, x, -", "-"])
    args = group_norm_gradients(x, w, group, ALL)
    check_expansion(GROUP_NORM_BACKWARD, *args, cut=["-, -, x, -", "-, -, x, -", "-, -", "-, -", "-"], tolerance=1e-4)
    args = group_norm_gradients(x, None, group, [True, False, False])
    check_expansion(GROUP_NORM_BACKWARD, *args, cut=["y, -, x, -", "y, -, x, -", "-, -", "-, -"], tolerance=1e-4)


def test_group_norm_of_cut_channels():
    x, w = torch.randn(3, 6), torch.randn(6)
    check_expansion(GROUP_NORM, x, w, None, *sizes(x, 2), 1e-5, cut=["-, x", "x"])
    check_expansion(GROUP_NORM, x, w, None, *sizes(x, 1), 1e-5, cut=["-, x y", "-"])


# --- Batch norm -------------------------------------------------------------------------------------------------------

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


# --- Weight norm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim):
    v = torch.randn(5, 3, 2)
    g = torch.randn([size if place == dim else 1 for place, size in enumerate(v.shape)])
    _, norm = resolve("aten._weight_norm_interface.default")(v, g, dim)
    check("aten._weight_norm_interface.default", v, g, dim)
    check("aten._weight_norm_interface_backward.default", torch.randn(v.shape), v, g, norm, dim)
    cut = ["-, x, -", "-, -, -"]
    check_expansion("aten._weight_norm_interface.default", v, g, dim, cut=cut)
    backward = ("aten._weight_norm_interface_backward.default", torch.randn(v.shape), v, g, norm, dim)
    check_expansion(*backward, cut=[cut[0], *cut, cut[1]])


def test_renorm_passes_its_dim():
    check("aten.renorm.default", torch.randn(5, 3, 2), 2, 0, 1.0)
    check("aten.renorm.default", torch.randn(5, 3), 1, -1, 0.5)


# --- Negative log likelihood ------------------------------------------------------------------------------------------

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
