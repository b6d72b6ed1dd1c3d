"""Pointwise ops and reductions of random programs."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F  # noqa: N812

from tests.fuzz.op_table import (
    Drawn,
    OpTable,
    Tensor,
    draw_dim,
    draw_dim_and_flag,
    draw_number,
    draw_one_dim,
    require,
)

OPS = OpTable()


_UNARY = (
    "relu gelu silu tanh sigmoid sin cos exp abs neg square softplus leaky_relu elu hardtanh hardswish hardsigmoid "
    "mish erf expm1 atan logsigmoid softsign selu celu relu6 tanhshrink hardshrink softshrink sqrt rsqrt log log1p "
    "reciprocal sinh asinh exp2 erfc sinc floor round sign trunc frac"
)
_BINARY = "add sub mul div maximum minimum atan2 hypot fmax fmin logaddexp copysign"
for _name in _UNARY.split():
    OPS.add(_name, 1, getattr(torch, _name, None) or getattr(F, _name))
for _name in _BINARY.split():
    OPS.add(_name, 2, getattr(torch, _name))

OPS.add("double", 1, lambda x: x.double())
OPS.add("float", 1, lambda x: x.float())
OPS.add("clone", 1, torch.clone)
OPS.add("contiguous", 1, lambda x: x.contiguous())
OPS.add("detach_and_add", 1, lambda x: x.detach() + x)
OPS.add("add_number", 1, torch.add, draw_number)
OPS.add("mul_number", 1, torch.mul, draw_number)
OPS.add("div_number", 1, torch.div, draw_number)
OPS.add("number_sub", 1, lambda x, c: c - x, draw_number)
OPS.add("number_div", 1, lambda x, c: c / x, draw_number)
OPS.add("pow_number", 1, torch.pow, lambda chance, x: Drawn((chance.choice([2, 3, -1, 0.5, 2.0]),)))
OPS.add("clamp", 1, torch.clamp, lambda chance, x: Drawn(tuple(sorted([chance.uniform(-1, 1) for _ in range(2)]))))
OPS.add("clamp_min", 1, torch.clamp_min, draw_number)
OPS.add("add_alpha", 2, lambda x, y, c: torch.add(x, y, alpha=c), draw_number)
OPS.add("lerp", 2, torch.lerp, draw_number)
OPS.add("lerp_tensor", 3, torch.lerp)
OPS.add("addcmul", 3, lambda x, y, z, c: torch.addcmul(x, y, z, value=c), draw_number)
OPS.add("addcdiv", 3, lambda x, y, z, c: torch.addcdiv(x, y, z, value=c), draw_number)
OPS.add("where", 3, lambda x, y, z: torch.where(x > 0, y, z))
OPS.add("where_number", 2, lambda x, y, c: torch.where(x > 0, y, c), draw_number)
OPS.add("masked_fill", 2, lambda x, y, c: x.masked_fill(y > 0, c), draw_number)
OPS.add("nan_to_num", 1, lambda x: torch.nan_to_num(x, 1.0, 2.0, -2.0))
OPS.add("prelu", 1, F.prelu, lambda chance, x: Drawn((), ((x.shape[1] if x.dim() > 1 else 1,),)))
OPS.add("glu", 1, F.glu, draw_one_dim)


def _few_zeros(chance: random.Random, x: Tensor) -> Drawn:
    """For `prod`: with two zeros, torch's gradient is 0 also where the gradient that comes in is infinite, and GT's is
    NaN (docs/limits.md)."""
    require(int((x == 0).sum()) < 2)
    return Drawn()


for _name in ["sum", "mean", "amax", "amin", "logsumexp"]:
    OPS.add(_name, 1, getattr(torch, _name), draw_dim_and_flag)
for _name in ["softmax", "log_softmax"]:
    OPS.add(_name, 1, getattr(torch, _name), draw_one_dim)
for _name in ["sum", "mean", "max", "min", "var", "norm", "nansum"]:
    OPS.add(f"{_name}_all", 1, getattr(torch, _name))
OPS.add("prod_all", 1, torch.prod, _few_zeros)
OPS.add("var", 1, lambda x, d, keep: torch.var(x, d, keepdim=keep), draw_dim_and_flag)
OPS.add("std", 1, lambda x, d, keep: torch.std(x, d, keepdim=keep), draw_dim_and_flag)
OPS.add("prod", 1, lambda x, d, keep: torch.prod(x, d, keep), draw_dim_and_flag)
OPS.add("max_values", 1, lambda x, d, keep: torch.max(x, d, keep).values, draw_dim_and_flag)
# torch 2.13 reads outside the memory of an expanded tensor here
OPS.add("median_values", 1, lambda x, d, keep: torch.median(x.contiguous(), d, keep).values, draw_dim_and_flag)
OPS.add("cumsum", 1, torch.cumsum, draw_one_dim)
OPS.add("cumprod", 1, torch.cumprod, draw_one_dim)
OPS.add("cummax", 1, lambda x, d: torch.cummax(x, d).values, draw_one_dim)
OPS.add("logcumsumexp", 1, torch.logcumsumexp, draw_one_dim)
OPS.add("sort_values", 1, lambda x, d: torch.sort(x, d).values, draw_one_dim)


def _vector_norm(chance: random.Random, x: Tensor) -> Drawn:
    return Drawn((chance.choice([1, 2, 3.0, float("inf")]), draw_dim(chance, x)))


def _topk(chance: random.Random, x: Tensor) -> Drawn:
    dim = draw_dim(chance, x)
    return Drawn((chance.randint(1, max(1, x.shape[dim])), dim))


OPS.add("vector_norm", 1, lambda x, p, d: torch.linalg.vector_norm(x, p, d), _vector_norm)
OPS.add("topk_values", 1, lambda x, k, d: torch.topk(x, k, d).values, _topk)
OPS.add("normalize", 1, lambda x, d: F.normalize(x, dim=d), draw_one_dim)
