"""Programs as data: leaves, then steps. Each step makes a register; the registers of leaves come first."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gt.core.meta import contiguous_strides, memory_span
from tests.fuzz.op_table import Drawn, Shape, Unfit
from tests.fuzz.ops import POOL, pick

MOST_ELEMENTS = 2048
FORMATS = (
    "channels_last", "permuted", "expanded", "sliced", "shifted", "stored channels_last", "stored permuted",
    "stored expanded", "stored stepped", "stored windows",
)  # fmt: skip
# torch's own batch norm reads outside the memory of weights with gaps or overlaps
DENSE_FORMATS = tuple([name for name in FORMATS if name not in ("expanded", "sliced")])
_THEMES: dict[str, tuple[Shape, ...]] = {
    "images": ((2, 4, 5, 5), (3, 2, 4, 6), (4, 2, 6, 4), (1, 4, 3, 3), (5, 4, 4, 4)),
    "sequences": ((2, 3, 4), (3, 4, 5), (4, 1, 3), (5, 2, 6), (2, 3, 4, 2)),
    "matrices": ((4, 6), (6, 4), (5, 3), (4, 4), (7, 2), (3, 1), (8,), (6,)),
    "anything": ((), (1,), (0, 3), (2, 2, 3, 3, 2), (8,), (4, 6), (2, 3, 4), (2, 4, 5, 5), (3, 1)),
}
_ODD_VALUES = (float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e30, 1e-30)


@dataclass(frozen=True)
class Leaf:
    """A tensor of the shape that a format makes of memory of another shape, or (stored ...) of memory of that shape
    with other strides. `odd` counts its odd values."""

    shape: Shape
    format: str = "contiguous"
    needs_grad: bool = True
    odd: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """An op of the pool on registers. `layout`, where it is not 0: its result is laid out anew, at random by it."""

    op: str
    inputs: tuple[int, ...]
    constants: tuple[Any, ...] = ()
    layout: int = 0


@dataclass(frozen=True)
class Program:
    """`whole`: nothing is cut, and all runs on one worker."""

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    whole: bool = False

    def __str__(self) -> str:
        lines = ["on one worker"] if self.whole else []
        lines += [f"%{place} = {leaf}" for place, leaf in enumerate(self.leaves)]
        for place, step in enumerate(self.steps, len(self.leaves)):
            arguments = ", ".join([*[f"%{register}" for register in step.inputs], *map(repr, step.constants)])
            lines.append(f"%{place} = {step.op}({arguments})" + (f" laid out by {step.layout}" if step.layout else ""))
        return "\n".join(lines)


@dataclass(frozen=True)
class Run:
    """What a side made: the registers, and the gradients of leaves that need one. `strides` are those of both."""

    registers: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    strides: list[Shape]


@dataclass(frozen=True)
class Side:
    """Who runs a program. `place` copies the memory of a leaf to where the side computes, `lay_out` moves a tensor by
    a seed. An `exact` side computes in float64 whatever the program says."""

    place: Callable[[torch.Tensor, int], torch.Tensor] = lambda tensor, seed: tensor.clone()
    lay_out: Callable[[torch.Tensor, int], torch.Tensor] = lambda tensor, seed: tensor.clone()
    exact: bool = False
    noise: float = 0.0


def memory_of(leaf: Leaf) -> torch.Tensor:
    """The values that a leaf's memory holds, before its format makes a view of them."""
    generator = torch.Generator().manual_seed(leaf.seed)
    values = torch.randn(_memory_shape(leaf), generator=generator)
    flat = values.view(-1)
    for place in range(min(leaf.odd, flat.numel())):
        at = int(torch.randint(flat.numel(), (), generator=generator))
        flat[at] = _ODD_VALUES[(leaf.seed + place) % len(_ODD_VALUES)]
    if leaf.format == "stored channels_last" and len(leaf.shape) == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if leaf.format == "stored permuted":
        order = list(reversed(range(len(leaf.shape))))
        return values.permute(order).contiguous().permute(order)
    odd_stride = _odd_stride(leaf)
    return values if odd_stride is None else values.as_strided(leaf.shape, odd_stride)


def _odd_stride(leaf: Leaf) -> Shape | None:
    """The strides of memory in which elements share memory or leave gaps: what is copied to a side has others."""
    dense = contiguous_strides(leaf.shape)
    if leaf.format == "stored expanded":
        return tuple([step * ((leaf.seed >> dim) & 1) for dim, step in enumerate(dense)])
    if leaf.format == "stored stepped":
        return tuple([2 * step for step in dense])
    return (1,) * len(dense) if leaf.format == "stored windows" else None


def _memory_shape(leaf: Leaf) -> Shape:
    shape = leaf.shape
    if leaf.format == "channels_last" and len(shape) == 4:
        return (shape[0], *shape[2:], shape[1])
    if leaf.format == "permuted":
        return shape[::-1]
    if leaf.format == "expanded" and shape:
        return (1, *shape[1:])
    if leaf.format == "sliced" and shape:
        return (*shape[:-1], 2 * shape[-1])
    if leaf.format == "shifted" and shape:
        return (shape[0] + 1, *shape[1:])
    odd_stride = _odd_stride(leaf)
    return shape if odd_stride is None else (memory_span(shape, odd_stride),)


def as_formatted(memory: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """The leaf as a view of its memory."""
    shape = leaf.shape
    if leaf.format == "channels_last" and len(shape) == 4:
        return memory.permute(0, 3, 1, 2)
    if leaf.format == "permuted":
        return memory.permute(list(reversed(range(len(shape)))))
    if leaf.format == "expanded" and shape:
        return memory.expand(shape)
    if leaf.format == "sliced" and shape:
        return memory[..., ::2]
    if leaf.format == "shifted" and shape:
        return memory[1:]
    return memory


def apply(step: Step, values: Sequence[torch.Tensor], side: Side) -> torch.Tensor:
    if side.exact and step.op in ("float", "double"):
        result = values[0].clone()
    else:
        result = POOL[step.op].call(*values, *step.constants)
    return side.lay_out(result, step.layout) if step.layout else result


def _leaf_on(side: Side, leaf: Leaf) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory of a leaf, which gets its gradient, and the leaf."""
    values = memory_of(leaf)
    if side.noise:
        values = values * (
            1 + side.noise * torch.randn(values.shape, generator=torch.Generator().manual_seed(leaf.seed))
        )
    memory = side.place(values.double() if side.exact else values, leaf.seed).requires_grad_(leaf.needs_grad)
    return memory, as_formatted(memory, leaf)


def run(program: Program, side: Side) -> Run:
    """All registers, and the gradients of the sum of all that no step uses, each weighed by fixed numbers."""
    pairs = [_leaf_on(side, leaf) for leaf in program.leaves]
    registers = [value for _, value in pairs]
    for step in program.steps:
        registers.append(apply(step, [registers[place] for place in step.inputs], side))
    used = {place for step in program.steps for place in step.inputs}
    ends = [value for place, value in enumerate(registers) if place not in used and place >= len(program.leaves)]
    ends = [value for value in ends if value.requires_grad]
    if ends:
        torch.autograd.backward(ends, [side.place(_cotangent(value), place) for place, value in enumerate(ends)])
    gradients = [memory.grad for memory, _ in pairs]
    return Run(registers, gradients, [value.stride() for value in (*registers, *gradients) if value is not None])


def _cotangent(value: torch.Tensor) -> torch.Tensor:
    count = value.numel()
    return torch.linspace(-1, 1.5, max(count, 1), dtype=value.dtype)[:count].reshape(value.shape)


# --- Drawing ----------------------------------------------------------------------------------------------------------


def draw_program(seed: int) -> Program:
    """A program that torch runs. Which ops it has room for depends on the seed too, so that programs differ in kind."""
    chance = random.Random(seed)
    names = chance.sample(sorted(POOL), chance.randint(6, len(POOL)))
    is_odd = chance.random() < 0.25
    shapes = _THEMES[chance.choice(sorted(_THEMES))]
    leaves = [draw_leaf(chance, chance.choice(shapes), is_odd) for _ in range(chance.randint(1, 3))]
    program = Program(tuple(leaves), (), chance.random() < 0.2)
    values = [as_formatted(memory_of(leaf).clone(), leaf) for leaf in leaves]
    length, tries = chance.randint(1, 8), 0
    while len(program.steps) < length and tries < 200:
        tries += 1
        program, values = _extended(chance, program, values, names, is_odd)
    return program


def draw_leaf(chance: random.Random, shape: Shape, is_odd: bool, formats: Sequence[str] = FORMATS) -> Leaf:
    format_ = "contiguous" if chance.random() < 0.5 else chance.choice(formats)
    odd = chance.randint(1, 3) if is_odd and chance.random() < 0.5 else 0
    return Leaf(shape, format_, chance.random() < 0.7, odd, chance.randrange(1 << 30))


def _extended(
    chance: random.Random, program: Program, values: list[torch.Tensor], names: Sequence[str], is_odd: bool
) -> tuple[Program, list[torch.Tensor]]:
    """A program with one step more, if what was drawn is one that torch runs. New leaves come after the others, so
    steps are numbered anew."""
    op = pick(chance, names)
    first = chance.randrange(max(0, len(values) - 3), len(values))
    chosen = (first, *[chance.randrange(len(values)) for _ in range(op.tensors - 1)])
    try:
        drawn: Drawn = op.draw(chance, *[values[place] for place in chosen])
        leaves = [draw_leaf(chance, shape, is_odd, DENSE_FORMATS) for shape in drawn.leaves]
        if op.name.startswith("conv"):  # zeros beyond an edge times an infinite weight: docs/limits.md
            leaves = [replace(leaf, odd=0) for leaf in leaves]
        extra = [as_formatted(memory_of(leaf).clone(), leaf) for leaf in leaves]
        given = [*[values[place] for place in chosen], *extra]
        layout = chance.randrange(1, 1 << 30) if chance.random() < 0.15 else 0
        made = apply(Step(op.name, (), drawn.constants), given, Side())
    except (Unfit, RuntimeError, IndexError, ValueError, TypeError, AssertionError):
        return program, values
    if made.numel() > MOST_ELEMENTS or not made.dtype.is_floating_point:
        return program, values
    own, added = len(program.leaves), len(leaves)
    step = Step(op.name, (*chosen, *range(own, own + added)), drawn.constants, layout)
    grown = replace(program, leaves=program.leaves + tuple(leaves), steps=_shifted(program.steps, own, added))
    own_inputs = tuple([place + added if place >= own else place for place in chosen])
    step = replace(step, inputs=(*own_inputs, *range(own, own + added)))
    return replace(grown, steps=(*grown.steps, step)), [*values[:own], *extra, *values[own:], made]


def _shifted(steps: Sequence[Step], first: int, by: int) -> tuple[Step, ...]:
    """Steps whose registers from `first` on have other numbers."""
    return tuple([replace(step, inputs=tuple([p + by if p >= first else p for p in step.inputs])) for step in steps])
