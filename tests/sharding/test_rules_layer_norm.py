"""Layer norm, shard by shard."""

from __future__ import annotations

import torch

from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check, resolve

ALL = [True, True, True]
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
