"""Records of programs: their definitions, and how they are split into parts that workers replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from gt.core.program import Program
from gt.dispatcher.op_definitions import InputLayout
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import ShardingSpec

Layouts: TypeAlias = tuple[InputLayout, ...]
"""Layouts of tensors, with those of their copies."""


class LinearOp(NamedTuple):
    """An op whose plan is valid only for scalars with which it is linear, and the slots of its scalars."""

    op: str
    scalars: tuple[int, ...]


class ProgramPart(NamedTuple):
    """Consecutive ops of a client's program, from its step `start` to `end`, that run on the same workers and neither
    move nor exchange tensors. The workers replay them as a program of their own, with the id `part_id`.

    Slots are those of the client's program, except in `program`. `inputs` are the tensors that exist before the part,
    and `layouts` their layouts. `sources` are the inputs of the workers' program: a slot, and the layout of its copy to
    use, None for the tensor itself. `written` are the inputs that the part writes to, each with the slot of its last
    version. `outputs` are all slots that the part gives; `results` are those of them that the part does not overwrite.
    Inputs in `placed` stay in their layouts from then on. `notes` are the steps between the ops, which follow the
    part.
    """

    part_id: int
    start: int
    end: int
    workers: tuple[int, ...]
    program: Program
    inputs: tuple[int, ...]
    layouts: Layouts
    sources: tuple[tuple[int, ShardingSpec | None], ...]
    written: tuple[tuple[int, int], ...]
    outputs: range
    results: tuple[tuple[int, TensorRecord], ...]
    placed: tuple[int, ...]
    linear: tuple[LinearOp, ...]
    scalars: slice
    notes: tuple[int, ...]


class PartVariant(NamedTuple):
    """The consequences for one part of the slots that die in a run. `dead` are the slots that die in the part, as slots
    of the workers' program, those of copies too. As slots of the client's program, `freed` are the inputs among them,
    `copied` those that have copies, and `gone` all of them, which need no FreeTensors. `results` are the new tensors
    that outlive the part."""

    dead: tuple[int, ...]
    freed: tuple[int, ...]
    copied: tuple[int, ...]
    gone: frozenset[int]
    results: tuple[tuple[int, TensorRecord], ...]


class SplitVariant(NamedTuple):
    """The consequences for all parts of the slots that die in a run: the variant of each part, and the dead slots by
    the position of the last step that names them. `all_frees` has all of them, `other_frees` those that no part
    frees."""

    parts: tuple[PartVariant, ...]
    all_frees: Mapping[int, tuple[int, ...]]
    other_frees: Mapping[int, tuple[int, ...]]


@dataclass
class ProgramSplit:
    """The parts of a program, in order; the steps between them are planned one by one. `variants` has an entry for each
    set of dead slots."""

    parts: tuple[ProgramPart, ...]
    variants: dict[tuple[int, ...], SplitVariant] = field(default_factory=dict, compare=False)


@dataclass
class ProgramRecord:
    """A program of a client. `nbytes` is the size of all its outputs, and `splits` are by the layouts of the inputs
    that its ops use, and of their copies."""

    program_id: int
    program: Program
    nbytes: int
    splits: dict[Layouts, ProgramSplit] = field(default_factory=dict)

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The inputs that the ops use: another step may name a tensor that is gone."""
        named = {slot for op in self.program.ops for slot in op.inputs}
        return tuple([slot for slot in range(self.program.inputs) if slot in named])
