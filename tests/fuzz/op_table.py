"""Tables of ops: how each op is called, and how its constants are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

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


def draw_nothing(chance: random.Random, *tensors: Tensor) -> Drawn:
    return Drawn()


class OpTable(dict[str, Op]):
    """Ops by name."""

    def add(
        self, name: str, tensors: int, call: Callable[..., Tensor], draw: Callable[..., Drawn] = draw_nothing
    ) -> None:
        self[name] = Op(name, tensors, call, draw)


def require(condition: bool) -> None:
    if not condition:
        raise Unfit


def draw_dim(chance: random.Random, x: Tensor) -> int:
    require(x.dim() > 0)
    return chance.randrange(-x.dim(), x.dim())


def draw_one_dim(chance: random.Random, x: Tensor, *_: Tensor) -> Drawn:
    return Drawn((draw_dim(chance, x),))


def draw_dim_and_flag(chance: random.Random, x: Tensor) -> Drawn:
    return Drawn((draw_dim(chance, x), chance.random() < 0.5))


def draw_number(chance: random.Random, *_: Tensor) -> Drawn:
    return Drawn((chance.choice(NUMBERS if chance.random() < 0.85 else ODD_NUMBERS),))


def draw_indices(chance: random.Random, size: int, count: int) -> list[int]:
    require(size > 0)
    return [chance.randrange(size) for _ in range(count)]
