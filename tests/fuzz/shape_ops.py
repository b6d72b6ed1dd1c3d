"""Views, indexing and in-place writes of random programs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.fuzz.op_table import (
    Drawn,
    OpTable,
    Tensor,
    draw_dim,
    draw_indices,
    draw_number,
    draw_one_dim,
    require,
)

OPS = OpTable()


def _permutation(chance: random.Random, x: Tensor) -> Drawn:
    return Drawn((chance.sample(range(x.dim()), x.dim()),))


def _reshaping(chance: random.Random, x: Tensor) -> Drawn:
    sizes, rest = [], x.numel()
    require(rest > 0)
    for _ in range(chance.randint(0, 3)):
        size = chance.choice([size for size in range(1, rest + 1) if rest % size == 0])
        sizes.append(size)
        rest //= size
    return Drawn(([*sizes, rest],))


def _slicing(chance: random.Random, x: Tensor) -> Drawn:
    dim = draw_dim(chance, x)
    start, stop = sorted([chance.randint(0, x.shape[dim]) for _ in range(2)])
    return Drawn((dim, start, stop, chance.choice([1, 1, 2, 3])))


def _slice(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, stop, step),)]


def _flattening(chance: random.Random, x: Tensor) -> Drawn:
    require(x.dim() > 0)
    return Drawn(tuple(sorted([chance.randrange(x.dim()) for _ in range(2)])))


def _selection(chance: random.Random, x: Tensor) -> Drawn:
    dim = draw_dim(chance, x)
    require(x.shape[dim] > 0)
    return Drawn((dim, chance.randrange(x.shape[dim])))


def _two_dims(chance: random.Random, x: Tensor) -> Drawn:
    require(x.dim() > 1)
    return Drawn(tuple(chance.sample(range(x.dim()), 2)))


def _shift(chance: random.Random, x: Tensor) -> Drawn:
    return Drawn((chance.randint(-3, 3), draw_dim(chance, x)))


def _padding(chance: random.Random, x: Tensor) -> Drawn:
    mode = chance.choice(["constant", "reflect", "replicate", "circular"])
    dims = chance.randint(1, min(2, max(1, x.dim()))) if mode == "constant" else x.dim() - 2
    return Drawn(([chance.randint(0, 2) for _ in range(2 * max(dims, 1))], mode))


def _unfolding(chance: random.Random, x: Tensor) -> Drawn:
    dim = draw_dim(chance, x)
    require(x.shape[dim] > 0)
    return Drawn((dim, chance.randint(1, x.shape[dim]), chance.randint(1, 2)))


OPS.add("permute", 1, lambda x, dims: x.permute(dims), _permutation)
OPS.add("transpose", 1, torch.transpose, _two_dims)
OPS.add("reshape", 1, torch.reshape, _reshaping)
OPS.add("permute_reshape", 1, lambda x, dims: x.permute(dims).reshape(-1), _permutation)
OPS.add("flatten", 1, torch.flatten, _flattening)
OPS.add("unsqueeze", 1, torch.unsqueeze, draw_one_dim)
OPS.add("squeeze", 1, torch.squeeze)
OPS.add("expand_more", 1, lambda x, n: x.expand(n, *x.shape), lambda chance, x: Drawn((chance.randint(1, 3),)))
OPS.add("slice", 1, _slice, _slicing)
OPS.add("select", 1, torch.select, _selection)
OPS.add("flip", 1, lambda x, d: torch.flip(x, [d]), draw_one_dim)
OPS.add("roll", 1, torch.roll, _shift)
OPS.add("diagonal", 1, lambda x, a, b: torch.diagonal(x, 0, a, b), _two_dims)
OPS.add("tril", 1, torch.tril, lambda chance, x: Drawn((chance.randint(-2, 2),)))
OPS.add("movedim", 1, torch.movedim, _two_dims)
OPS.add("unfold", 1, lambda x, *c: x.unfold(*c), _unfolding)
OPS.add("pad", 1, lambda x, pads, mode: F.pad(x, pads, mode=mode), _padding)
OPS.add("repeat_interleave", 1, lambda x, d: x.repeat_interleave(2, d), draw_one_dim)
OPS.add("tile", 1, lambda x: x.tile((2,)))
OPS.add("chunk", 1, lambda x, d: x.chunk(2, d)[-1], draw_one_dim)
OPS.add("unbind", 1, lambda x, d: x.unbind(d)[0], draw_one_dim)
OPS.add("channels_last", 1, lambda x: x.contiguous(memory_format=torch.channels_last))
OPS.add("cat", 2, lambda x, y, d: torch.cat([x, y], d), draw_one_dim)
OPS.add("cat_three", 3, lambda x, y, z, d: torch.cat([x, y, z], d), draw_one_dim)
OPS.add("stack", 2, lambda x, y, d: torch.stack([x, y], d), draw_one_dim)
OPS.add("pixel_shuffle", 1, lambda x: F.pixel_shuffle(x, 2))
OPS.add("channel_shuffle", 1, lambda x: F.channel_shuffle(x, 2))


def _index_list(chance: random.Random, x: Tensor) -> Drawn:
    dim = draw_dim(chance, x)
    return Drawn((dim, draw_indices(chance, x.shape[dim], chance.randint(1, 5))))


def _gathering(chance: random.Random, x: Tensor) -> Drawn:
    dim = draw_dim(chance, x)
    return Drawn((dim, chance.randrange(1 << 20)))


def _random_index(x: Tensor, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(x.shape[dim], x.shape, generator=generator)


OPS.add("index_select", 1, lambda x, d, i: torch.index_select(x, d, torch.tensor(i)), _index_list)
OPS.add("index", 1, lambda x, d, i: x.movedim(d, 0)[torch.tensor(i)], _index_list)
OPS.add("gather", 1, lambda x, d, s: torch.gather(x, d, _random_index(x, d, s)), _gathering)
OPS.add("scatter_add", 2, lambda x, y, d, s: x.scatter_add(d, _random_index(x, d, s), y.expand(x.shape)), _gathering)
OPS.add(
    "index_add", 1, lambda x, d, i: x.index_add(d, torch.tensor(i), x.index_select(d, torch.tensor(i))), _index_list
)
OPS.add("embedding", 1, lambda x, d, i: F.embedding(torch.tensor([i, i]), x), _index_list)


def _written(write: Callable[..., Any]) -> Callable[..., Tensor]:
    """Write to a copy, and give it."""

    def call(x: Tensor, *rest: Any) -> Tensor:
        copy = x.clone()
        write(copy, *rest)
        return copy

    return call


def _write_slice(x: Tensor, y: Tensor, dim: int, start: int, stop: int, step: int) -> None:
    _slice(x, dim, start, stop, step).copy_(y.sum())


OPS.add("add_", 2, _written(torch.Tensor.add_))
OPS.add("mul_", 2, _written(torch.Tensor.mul_))
OPS.add("copy_", 2, _written(torch.Tensor.copy_))
OPS.add("relu_", 1, _written(torch.relu_))
OPS.add("write_slice", 2, _written(_write_slice), lambda chance, x, y: _slicing(chance, x))
OPS.add("write_transposed", 1, _written(lambda x: x.mT.mul_(2)))
OPS.add("write_diagonal", 2, _written(lambda x, y: x.diagonal(0, -2, -1).add_(y.sum())))
OPS.add("masked_fill_", 2, _written(lambda x, y, c: x.masked_fill_(y > 0, c)), draw_number)
