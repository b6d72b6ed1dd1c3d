"""Products, convolutions, norms, pooling and losses of random programs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.fuzz.op_table import (
    NUMBERS,
    Drawn,
    OpTable,
    Tensor,
    draw_indices,
    draw_number,
    require,
)

OPS = OpTable()


def _linear(chance: random.Random, x: Tensor) -> Drawn:
    require(x.dim() > 0)
    out = chance.randint(1, 6)
    return Drawn((), ((out, x.shape[-1]), *([(out,)] if chance.random() < 0.6 else [])))


def _addmm(chance: random.Random, x: Tensor) -> Drawn:
    require(x.dim() == 2)
    out = chance.randint(1, 6)
    return Drawn((chance.choice(NUMBERS), chance.choice(NUMBERS)), ((x.shape[1], out), (out,)))


def _baddbmm(chance: random.Random, x: Tensor) -> Drawn:
    require(x.dim() == 3)
    out = chance.randint(1, 4)
    return Drawn(draw_number(chance).constants, ((x.shape[0], x.shape[2], out), (x.shape[1], out)))


def _addmv(chance: random.Random, x: Tensor) -> Drawn:
    require(x.dim() == 2)
    return Drawn(draw_number(chance).constants, ((x.shape[1],), (x.shape[0],)))


def _self_attention(chance: random.Random, x: Tensor) -> Drawn:
    require(x.dim() in (3, 4) and x.numel() > 0)
    keys = (*x.shape[:-2], chance.randint(1, 5), x.shape[-1])
    return Drawn((chance.random() < 0.3,), (keys, keys))


def _finite(chance: random.Random, x: Tensor) -> Drawn:
    """For functions of a product: they may be finite where it is infinite, and NaN on GT (docs/limits.md)."""
    require(bool(x.isfinite().all()))
    return Drawn()


OPS.add("matmul_transposed", 1, lambda x: x @ x.mT)
OPS.add("matmul", 2, torch.matmul)
OPS.add("linear", 1, lambda x, w, b=None: F.linear(x, w, b), _linear)
OPS.add("addmm", 1, lambda x, w, b, beta, alpha: torch.addmm(b, x, w, beta=beta, alpha=alpha), _addmm)
OPS.add("det", 1, lambda x: torch.linalg.det(x @ x.mT * 0.2 + 2 * torch.eye(x.shape[-2], dtype=x.dtype)), _finite)
OPS.add("inverse", 1, lambda x: torch.linalg.inv(x @ x.mT * 0.2 + 2 * torch.eye(x.shape[-2], dtype=x.dtype)), _finite)
OPS.add(
    "cholesky", 1, lambda x: torch.linalg.cholesky(x @ x.mT * 0.2 + 2 * torch.eye(x.shape[-2], dtype=x.dtype)), _finite
)
OPS.add("tensordot", 2, lambda x, y: torch.tensordot(x, y, 1))
OPS.add("cdist", 2, lambda x, y: torch.cdist(x, y))
OPS.add("baddbmm", 1, lambda x, y, z, c: torch.baddbmm(z, x, y, alpha=c), _baddbmm)
OPS.add("addmv", 1, lambda x, y, z, c: torch.addmv(z, x, y, beta=c), _addmv)
OPS.add("outer", 2, lambda x, y: torch.outer(x.flatten()[:8], y.flatten()[:8]))
OPS.add("einsum", 1, lambda x: torch.einsum("...ij,...kj->...ik", x, x * 0.5))
OPS.add("bilinear", 1, lambda x, w, b=None: F.linear(x, w, b).mul(F.linear(x, w)), _linear)
OPS.add(
    "attention", 1, lambda x, k, v, causal: F.scaled_dot_product_attention(x, k, v, is_causal=causal), _self_attention
)


def _convolution(spatial: int, transposed: bool = False) -> Callable[..., Drawn]:
    def draw(chance: random.Random, x: Tensor) -> Drawn:
        require(x.dim() == spatial + 2 and x.numel() > 0)
        groups = chance.choice([1, 1, 1, 2])
        require(x.shape[1] % groups == 0)
        out = groups * chance.randint(1, 3)
        kernel = tuple([chance.randint(1, 3) for _ in range(spatial)])
        weight = (x.shape[1], out // groups, *kernel) if transposed else (out, x.shape[1] // groups, *kernel)
        bias = ((out,),) if chance.random() < 0.6 else ()
        return Drawn((chance.randint(1, 2), chance.randint(0, 1), groups), (weight, *bias))

    return draw


def _convolve(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        *bias, stride, padding, groups = rest
        return function(x, weight, bias[0] if bias else None, stride=stride, padding=padding, groups=groups)

    return call


for _spatial, _name in enumerate(("conv1d", "conv2d", "conv3d"), 1):
    OPS.add(_name, 1, _convolve(getattr(F, _name)), _convolution(_spatial))
for _spatial, _name in enumerate(("conv_transpose1d", "conv_transpose2d"), 1):
    OPS.add(_name, 1, _convolve(getattr(F, _name)), _convolution(_spatial, transposed=True))


def _norm(least: int) -> Callable[..., Drawn]:
    def draw(chance: random.Random, x: Tensor) -> Drawn:
        require(x.dim() >= least and x.numel() > 0)
        return Drawn((), ((x.shape[1],), (x.shape[1],)))

    return draw


def _last_dims(chance: random.Random, x: Tensor) -> Drawn:
    require(x.dim() > 0 and x.numel() > 0)
    shape = tuple(x.shape[chance.randrange(x.dim()) :])
    return Drawn((), (shape, shape))


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full((x.shape[1],), 0.1, dtype=x.dtype), torch.full((x.shape[1],), 2.0, dtype=x.dtype)


def _batch_norm_in_evaluation(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, *_statistics(x), w, b, False)


def _row_major_constant(x: Tensor) -> Tensor:
    """Torch crashes in the gradient of group_norm if the input is in channels_last and needs no gradient."""
    return x if x.requires_grad else x.contiguous()


OPS.add("batch_norm", 1, lambda x, w, b: F.batch_norm(x, None, None, w, b, True), _norm(2))
OPS.add("batch_norm_in_evaluation", 1, _batch_norm_in_evaluation, _norm(2))
OPS.add("instance_norm", 1, lambda x, w, b: F.instance_norm(x, None, None, w, b), _norm(3))
OPS.add("group_norm", 1, lambda x, w, b: F.group_norm(_row_major_constant(x), 2, w, b), _norm(2))
OPS.add("layer_norm", 1, lambda x, w, b: F.layer_norm(x, w.shape, w, b), _last_dims)
OPS.add("rms_norm", 1, lambda x, w, b: F.rms_norm(x, w.shape, w) + b, _last_dims)
OPS.add("max_pool2d", 1, lambda x: F.max_pool2d(x, 2, ceil_mode=True))
OPS.add("max_pool1d", 1, lambda x: F.max_pool1d(x, 3, 1, 1))
OPS.add("avg_pool2d", 1, lambda x: F.avg_pool2d(x, 2, 1, 1))
OPS.add("adaptive_avg_pool2d", 1, lambda x: F.adaptive_avg_pool2d(x, (2, 3)))
OPS.add("interpolate", 1, lambda x: F.interpolate(x, scale_factor=2, mode="nearest"))
OPS.add("interpolate_bilinear", 1, lambda x: F.interpolate(x, size=(3, 5), mode="bilinear"))


def _reduction(chance: random.Random, *_: Tensor) -> Drawn:
    return Drawn((chance.choice(["mean", "sum", "none"]),))


def _classes(chance: random.Random, x: Tensor) -> Drawn:
    require(x.dim() == 2 and x.numel() > 0)
    return Drawn((draw_indices(chance, x.shape[1], x.shape[0]), chance.choice(["mean", "sum", "none"])))


OPS.add("mse_loss", 2, lambda x, y, r: F.mse_loss(*torch.broadcast_tensors(x, y), reduction=r), _reduction)
OPS.add("smooth_l1_loss", 2, lambda x, y, r: F.smooth_l1_loss(*torch.broadcast_tensors(x, y), reduction=r), _reduction)
OPS.add("cross_entropy", 1, lambda x, t, r: F.cross_entropy(x, torch.tensor(t), reduction=r), _classes)
OPS.add(
    "bce_with_logits",
    2,
    lambda x, y, r: F.binary_cross_entropy_with_logits(*torch.broadcast_tensors(x, y.sigmoid()), reduction=r),
    _reduction,
)
