"""The pool of ops of random programs: how each is called, and how its constants are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812

Tensor: TypeAlias = torch.Tensor
Shape: TypeAlias = tuple[int, ...]
NUMBERS = (0.5, -1.5, 2, 3.0, 1, -1, 0.1)
ODD_NUMBERS = (0, 0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e30, 1e-30)


class Unfit(Exception):
    """These tensors do not suit this op; others may."""


@dataclass(frozen=True)
class Drawn:
    """The constants of a call, and the shapes of new leaves that it takes after its tensors (weights, for example)."""

    constants: tuple[Any, ...] = ()
    leaves: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class Op:
    """`call` takes the tensors and then the constants."""

    name: str
    tensors: int
    call: Callable[..., Tensor]
    draw: Callable[..., Drawn]


POOL: dict[str, Op] = {}


def _nothing(chance: random.Random, *tensors: Tensor) -> Drawn:
    return Drawn()


def _add(name: str, tensors: int, call: Callable[..., Tensor], draw: Callable[..., Drawn] = _nothing) -> None:
    POOL[name] = Op(name, tensors, call, draw)


def _need(condition: bool) -> None:
    if not condition:
        raise Unfit


def _dim(chance: random.Random, x: Tensor) -> int:
    _need(x.dim() > 0)
    return chance.randrange(-x.dim(), x.dim())


def _one_dim(chance: random.Random, x: Tensor, *_: Tensor) -> Drawn:
    return Drawn((_dim(chance, x),))


def _dim_and_flag(chance: random.Random, x: Tensor) -> Drawn:
    return Drawn((_dim(chance, x), chance.random() < 0.5))


def _number(chance: random.Random, *_: Tensor) -> Drawn:
    return Drawn((chance.choice(NUMBERS if chance.random() < 0.85 else ODD_NUMBERS),))


def _indices(chance: random.Random, size: int, count: int) -> list[int]:
    _need(size > 0)
    return [chance.randrange(size) for _ in range(count)]


# --- Pointwise --------------------------------------------------------------------------------------------------------

_UNARY = (
    "relu gelu silu tanh sigmoid sin cos exp abs neg square softplus leaky_relu elu hardtanh hardswish hardsigmoid "
    "mish erf expm1 atan logsigmoid softsign selu celu relu6 tanhshrink hardshrink softshrink sqrt rsqrt log log1p "
    "reciprocal sinh asinh exp2 erfc sinc floor round sign trunc frac"
)
_BINARY = "add sub mul div maximum minimum atan2 hypot fmax fmin logaddexp copysign"
for _name in _UNARY.split():
    _add(_name, 1, getattr(torch, _name, None) or getattr(F, _name))
for _name in _BINARY.split():
    _add(_name, 2, getattr(torch, _name))

_add("double", 1, lambda x: x.double())
_add("float", 1, lambda x: x.float())
_add("clone", 1, torch.clone)
_add("contiguous", 1, lambda x: x.contiguous())
_add("detach_and_add", 1, lambda x: x.detach() + x)
_add("add_number", 1, torch.add, _number)
_add("mul_number", 1, torch.mul, _number)
_add("div_number", 1, torch.div, _number)
_add("number_sub", 1, lambda x, c: c - x, _number)
_add("number_div", 1, lambda x, c: c / x, _number)
_add("pow_number", 1, torch.pow, lambda chance, x: Drawn((chance.choice([2, 3, -1, 0.5, 2.0]),)))
_add("clamp", 1, torch.clamp, lambda chance, x: Drawn(tuple(sorted([chance.uniform(-1, 1) for _ in range(2)]))))
_add("clamp_min", 1, torch.clamp_min, _number)
_add("add_alpha", 2, lambda x, y, c: torch.add(x, y, alpha=c), _number)
_add("lerp", 2, torch.lerp, _number)
_add("lerp_tensor", 3, torch.lerp)
_add("addcmul", 3, lambda x, y, z, c: torch.addcmul(x, y, z, value=c), _number)
_add("addcdiv", 3, lambda x, y, z, c: torch.addcdiv(x, y, z, value=c), _number)
_add("where", 3, lambda x, y, z: torch.where(x > 0, y, z))
_add("where_number", 2, lambda x, y, c: torch.where(x > 0, y, c), _number)
_add("masked_fill", 2, lambda x, y, c: x.masked_fill(y > 0, c), _number)
_add("nan_to_num", 1, lambda x: torch.nan_to_num(x, 1.0, 2.0, -2.0))
_add("prelu", 1, F.prelu, lambda chance, x: Drawn((), ((x.shape[1] if x.dim() > 1 else 1,),)))
_add("glu", 1, F.glu, _one_dim)


# --- Reductions, running totals, order -------------------------------------------------------------------------------

for _name in ["sum", "mean", "amax", "amin", "logsumexp"]:
    _add(_name, 1, getattr(torch, _name), _dim_and_flag)
for _name in ["softmax", "log_softmax"]:
    _add(_name, 1, getattr(torch, _name), _one_dim)
for _name in ["sum", "mean", "max", "min", "var", "norm", "prod", "nansum"]:
    _add(f"{_name}_all", 1, getattr(torch, _name))
_add("var", 1, lambda x, d, keep: torch.var(x, d, keepdim=keep), _dim_and_flag)
_add("std", 1, lambda x, d, keep: torch.std(x, d, keepdim=keep), _dim_and_flag)
_add("prod", 1, lambda x, d, keep: torch.prod(x, d, keep), _dim_and_flag)
_add("max_values", 1, lambda x, d, keep: torch.max(x, d, keep).values, _dim_and_flag)
# torch 2.13 reads outside the memory of an expanded tensor here
_add("median_values", 1, lambda x, d, keep: torch.median(x.contiguous(), d, keep).values, _dim_and_flag)
_add("cumsum", 1, torch.cumsum, _one_dim)
_add("cumprod", 1, torch.cumprod, _one_dim)
_add("cummax", 1, lambda x, d: torch.cummax(x, d).values, _one_dim)
_add("logcumsumexp", 1, torch.logcumsumexp, _one_dim)
_add("sort_values", 1, lambda x, d: torch.sort(x, d).values, _one_dim)


def _vector_norm(chance: random.Random, x: Tensor) -> Drawn:
    return Drawn((chance.choice([1, 2, 3.0, float("inf")]), _dim(chance, x)))


def _topk(chance: random.Random, x: Tensor) -> Drawn:
    dim = _dim(chance, x)
    return Drawn((chance.randint(1, max(1, x.shape[dim])), dim))


_add("vector_norm", 1, lambda x, p, d: torch.linalg.vector_norm(x, p, d), _vector_norm)
_add("topk_values", 1, lambda x, k, d: torch.topk(x, k, d).values, _topk)
_add("normalize", 1, lambda x, d: F.normalize(x, dim=d), _one_dim)


# --- Views and shapes -------------------------------------------------------------------------------------------------


def _permutation(chance: random.Random, x: Tensor) -> Drawn:
    return Drawn((chance.sample(range(x.dim()), x.dim()),))


def _reshaping(chance: random.Random, x: Tensor) -> Drawn:
    sizes, rest = [], x.numel()
    _need(rest > 0)
    for _ in range(chance.randint(0, 3)):
        size = chance.choice([size for size in range(1, rest + 1) if rest % size == 0])
        sizes.append(size)
        rest //= size
    return Drawn(([*sizes, rest],))


def _slicing(chance: random.Random, x: Tensor) -> Drawn:
    dim = _dim(chance, x)
    start, stop = sorted([chance.randint(0, x.shape[dim]) for _ in range(2)])
    return Drawn((dim, start, stop, chance.choice([1, 1, 2, 3])))


def _slice(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, stop, step),)]


def _flattening(chance: random.Random, x: Tensor) -> Drawn:
    _need(x.dim() > 0)
    return Drawn(tuple(sorted([chance.randrange(x.dim()) for _ in range(2)])))


def _selection(chance: random.Random, x: Tensor) -> Drawn:
    dim = _dim(chance, x)
    _need(x.shape[dim] > 0)
    return Drawn((dim, chance.randrange(x.shape[dim])))


def _two_dims(chance: random.Random, x: Tensor) -> Drawn:
    _need(x.dim() > 1)
    return Drawn(tuple(chance.sample(range(x.dim()), 2)))


def _shift(chance: random.Random, x: Tensor) -> Drawn:
    return Drawn((chance.randint(-3, 3), _dim(chance, x)))


def _padding(chance: random.Random, x: Tensor) -> Drawn:
    mode = chance.choice(["constant", "reflect", "replicate", "circular"])
    dims = chance.randint(1, min(2, max(1, x.dim()))) if mode == "constant" else x.dim() - 2
    return Drawn(([chance.randint(0, 2) for _ in range(2 * max(dims, 1))], mode))


def _unfolding(chance: random.Random, x: Tensor) -> Drawn:
    dim = _dim(chance, x)
    _need(x.shape[dim] > 0)
    return Drawn((dim, chance.randint(1, x.shape[dim]), chance.randint(1, 2)))


_add("permute", 1, lambda x, dims: x.permute(dims), _permutation)
_add("transpose", 1, torch.transpose, _two_dims)
_add("reshape", 1, torch.reshape, _reshaping)
_add("permute_reshape", 1, lambda x, dims: x.permute(dims).reshape(-1), _permutation)
_add("flatten", 1, torch.flatten, _flattening)
_add("unsqueeze", 1, torch.unsqueeze, _one_dim)
_add("squeeze", 1, torch.squeeze)
_add("expand_more", 1, lambda x, n: x.expand(n, *x.shape), lambda chance, x: Drawn((chance.randint(1, 3),)))
_add("slice", 1, _slice, _slicing)
_add("select", 1, torch.select, _selection)
_add("flip", 1, lambda x, d: torch.flip(x, [d]), _one_dim)
_add("roll", 1, torch.roll, _shift)
_add("diagonal", 1, lambda x, a, b: torch.diagonal(x, 0, a, b), _two_dims)
_add("tril", 1, torch.tril, lambda chance, x: Drawn((chance.randint(-2, 2),)))
_add("movedim", 1, torch.movedim, _two_dims)
_add("unfold", 1, lambda x, *c: x.unfold(*c), _unfolding)
_add("pad", 1, lambda x, pads, mode: F.pad(x, pads, mode=mode), _padding)
_add("repeat_interleave", 1, lambda x, d: x.repeat_interleave(2, d), _one_dim)
_add("tile", 1, lambda x: x.tile((2,)))
_add("chunk", 1, lambda x, d: x.chunk(2, d)[-1], _one_dim)
_add("unbind", 1, lambda x, d: x.unbind(d)[0], _one_dim)
_add("channels_last", 1, lambda x: x.contiguous(memory_format=torch.channels_last))
_add("cat", 2, lambda x, y, d: torch.cat([x, y], d), _one_dim)
_add("cat_three", 3, lambda x, y, z, d: torch.cat([x, y, z], d), _one_dim)
_add("stack", 2, lambda x, y, d: torch.stack([x, y], d), _one_dim)
_add("pixel_shuffle", 1, lambda x: F.pixel_shuffle(x, 2))
_add("channel_shuffle", 1, lambda x: F.channel_shuffle(x, 2))


# --- Indices ----------------------------------------------------------------------------------------------------------


def _index_list(chance: random.Random, x: Tensor) -> Drawn:
    dim = _dim(chance, x)
    return Drawn((dim, _indices(chance, x.shape[dim], chance.randint(1, 5))))


def _gathering(chance: random.Random, x: Tensor) -> Drawn:
    dim = _dim(chance, x)
    return Drawn((dim, chance.randrange(1 << 20)))


def _random_index(x: Tensor, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(x.shape[dim], x.shape, generator=generator)


_add("index_select", 1, lambda x, d, i: torch.index_select(x, d, torch.tensor(i)), _index_list)
_add("index", 1, lambda x, d, i: x.movedim(d, 0)[torch.tensor(i)], _index_list)
_add("gather", 1, lambda x, d, s: torch.gather(x, d, _random_index(x, d, s)), _gathering)
_add("scatter_add", 2, lambda x, y, d, s: x.scatter_add(d, _random_index(x, d, s), y.expand(x.shape)), _gathering)
_add("index_add", 1, lambda x, d, i: x.index_add(d, torch.tensor(i), x.index_select(d, torch.tensor(i))), _index_list)
_add("embedding", 1, lambda x, d, i: F.embedding(torch.tensor([i, i]), x), _index_list)


# --- Products ---------------------------------------------------------------------------------------------------------


def _linear(chance: random.Random, x: Tensor) -> Drawn:
    _need(x.dim() > 0)
    out = chance.randint(1, 6)
    return Drawn((), ((out, x.shape[-1]), *([(out,)] if chance.random() < 0.6 else [])))


def _addmm(chance: random.Random, x: Tensor) -> Drawn:
    _need(x.dim() == 2)
    out = chance.randint(1, 6)
    return Drawn((chance.choice(NUMBERS), chance.choice(NUMBERS)), ((x.shape[1], out), (out,)))


def _baddbmm(chance: random.Random, x: Tensor) -> Drawn:
    _need(x.dim() == 3)
    out = chance.randint(1, 4)
    return Drawn(_number(chance).constants, ((x.shape[0], x.shape[2], out), (x.shape[1], out)))


def _addmv(chance: random.Random, x: Tensor) -> Drawn:
    _need(x.dim() == 2)
    return Drawn(_number(chance).constants, ((x.shape[1],), (x.shape[0],)))


def _self_attention(chance: random.Random, x: Tensor) -> Drawn:
    _need(x.dim() in (3, 4) and x.numel() > 0)
    keys = (*x.shape[:-2], chance.randint(1, 5), x.shape[-1])
    return Drawn((chance.random() < 0.3,), (keys, keys))


_add("matmul_transposed", 1, lambda x: x @ x.mT)
_add("matmul", 2, torch.matmul)
_add("linear", 1, lambda x, w, b=None: F.linear(x, w, b), _linear)
_add("addmm", 1, lambda x, w, b, beta, alpha: torch.addmm(b, x, w, beta=beta, alpha=alpha), _addmm)
_add("det", 1, lambda x: torch.linalg.det(x @ x.mT * 0.2 + 2 * torch.eye(x.shape[-2], dtype=x.dtype)))
_add("inverse", 1, lambda x: torch.linalg.inv(x @ x.mT * 0.2 + 2 * torch.eye(x.shape[-2], dtype=x.dtype)))
_add("cholesky", 1, lambda x: torch.linalg.cholesky(x @ x.mT * 0.2 + 2 * torch.eye(x.shape[-2], dtype=x.dtype)))
_add("tensordot", 2, lambda x, y: torch.tensordot(x, y, 1))
_add("cdist", 2, lambda x, y: torch.cdist(x, y))
_add("baddbmm", 1, lambda x, y, z, c: torch.baddbmm(z, x, y, alpha=c), _baddbmm)
_add("addmv", 1, lambda x, y, z, c: torch.addmv(z, x, y, beta=c), _addmv)
_add("outer", 2, lambda x, y: torch.outer(x.flatten()[:8], y.flatten()[:8]))
_add("einsum", 1, lambda x: torch.einsum("...ij,...kj->...ik", x, x * 0.5))
_add("bilinear", 1, lambda x, w, b=None: F.linear(x, w, b).mul(F.linear(x, w)), _linear)
_add("attention", 1, lambda x, k, v, causal: F.scaled_dot_product_attention(x, k, v, is_causal=causal), _self_attention)


# --- Images -----------------------------------------------------------------------------------------------------------


def _convolution(spatial: int, transposed: bool = False) -> Callable[..., Drawn]:
    def draw(chance: random.Random, x: Tensor) -> Drawn:
        _need(x.dim() == spatial + 2 and x.numel() > 0)
        groups = chance.choice([1, 1, 1, 2])
        _need(x.shape[1] % groups == 0)
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
    _add(_name, 1, _convolve(getattr(F, _name)), _convolution(_spatial))
for _spatial, _name in enumerate(("conv_transpose1d", "conv_transpose2d"), 1):
    _add(_name, 1, _convolve(getattr(F, _name)), _convolution(_spatial, transposed=True))


def _norm(least: int) -> Callable[..., Drawn]:
    def draw(chance: random.Random, x: Tensor) -> Drawn:
        _need(x.dim() >= least and x.numel() > 0)
        return Drawn((), ((x.shape[1],), (x.shape[1],)))

    return draw


def _last_dims(chance: random.Random, x: Tensor) -> Drawn:
    _need(x.dim() > 0 and x.numel() > 0)
    shape = tuple(x.shape[chance.randrange(x.dim()) :])
    return Drawn((), (shape, shape))


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full((x.shape[1],), 0.1, dtype=x.dtype), torch.full((x.shape[1],), 2.0, dtype=x.dtype)


def _batch_norm_in_evaluation(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, *_statistics(x), w, b, False)


def _row_major_constant(x: torch.Tensor) -> torch.Tensor:
    """Torch crashes in the gradient of group_norm if the input is in channels_last and needs no gradient."""
    return x if x.requires_grad else x.contiguous()


_add("batch_norm", 1, lambda x, w, b: F.batch_norm(x, None, None, w, b, True), _norm(2))
_add("batch_norm_in_evaluation", 1, _batch_norm_in_evaluation, _norm(2))
_add("instance_norm", 1, lambda x, w, b: F.instance_norm(x, None, None, w, b), _norm(3))
_add("group_norm", 1, lambda x, w, b: F.group_norm(_row_major_constant(x), 2, w, b), _norm(2))
_add("layer_norm", 1, lambda x, w, b: F.layer_norm(x, w.shape, w, b), _last_dims)
_add("rms_norm", 1, lambda x, w, b: F.rms_norm(x, w.shape, w) + b, _last_dims)
_add("max_pool2d", 1, lambda x: F.max_pool2d(x, 2, ceil_mode=True))
_add("max_pool1d", 1, lambda x: F.max_pool1d(x, 3, 1, 1))
_add("avg_pool2d", 1, lambda x: F.avg_pool2d(x, 2, 1, 1))
_add("adaptive_avg_pool2d", 1, lambda x: F.adaptive_avg_pool2d(x, (2, 3)))
_add("interpolate", 1, lambda x: F.interpolate(x, scale_factor=2, mode="nearest"))
_add("interpolate_bilinear", 1, lambda x: F.interpolate(x, size=(3, 5), mode="bilinear"))


# --- Losses -----------------------------------------------------------------------------------------------------------


def _reduction(chance: random.Random, *_: Tensor) -> Drawn:
    return Drawn((chance.choice(["mean", "sum", "none"]),))


def _classes(chance: random.Random, x: Tensor) -> Drawn:
    _need(x.dim() == 2 and x.numel() > 0)
    return Drawn((_indices(chance, x.shape[1], x.shape[0]), chance.choice(["mean", "sum", "none"])))


_add("mse_loss", 2, lambda x, y, r: F.mse_loss(*torch.broadcast_tensors(x, y), reduction=r), _reduction)
_add("smooth_l1_loss", 2, lambda x, y, r: F.smooth_l1_loss(*torch.broadcast_tensors(x, y), reduction=r), _reduction)
_add("cross_entropy", 1, lambda x, t, r: F.cross_entropy(x, torch.tensor(t), reduction=r), _classes)
_add(
    "bce_with_logits",
    2,
    lambda x, y, r: F.binary_cross_entropy_with_logits(*torch.broadcast_tensors(x, y.sigmoid()), reduction=r),
    _reduction,
)


# --- Writes -----------------------------------------------------------------------------------------------------------


def _written(write: Callable[..., Any]) -> Callable[..., Tensor]:
    """Write to a copy, and give it."""

    def call(x: Tensor, *rest: Any) -> Tensor:
        copy = x.clone()
        write(copy, *rest)
        return copy

    return call


def _write_slice(x: Tensor, y: Tensor, dim: int, start: int, stop: int, step: int) -> None:
    _slice(x, dim, start, stop, step).copy_(y.sum())


_add("add_", 2, _written(torch.Tensor.add_))
_add("mul_", 2, _written(torch.Tensor.mul_))
_add("copy_", 2, _written(torch.Tensor.copy_))
_add("relu_", 1, _written(torch.relu_))
_add("write_slice", 2, _written(_write_slice), lambda chance, x, y: _slicing(chance, x))
_add("write_transposed", 1, _written(lambda x: x.mT.mul_(2)))
_add("write_diagonal", 2, _written(lambda x, y: x.diagonal(0, -2, -1).add_(y.sum())))
_add("masked_fill_", 2, _written(lambda x, y, c: x.masked_fill_(y > 0, c)), _number)


def pick(chance: random.Random, names: Sequence[str]) -> Op:
    return POOL[chance.choice(names)]
