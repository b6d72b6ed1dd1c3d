"""Records of segments: their definitions, and how they are split into parts that workers replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gt.core.segments import SegmentBody
from gt.dispatcher.op_definitions import InputLayout
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import ShardingSpec

Layouts: TypeAlias = tuple[InputLayout, ...]
"""The layouts of the externals of a segment or part, with those of their copies."""

SegmentKey: TypeAlias = tuple[Layouts, tuple[int, ...]]
"""The layouts of a segment's externals, and the positions of the instructions between its ops."""


class LinearOp(NamedTuple):
    """An op whose plan is valid only for scalars with which it is linear, and the range of its scalars."""

    op: str
    first_scalar: int
    end_scalar: int


class SegmentPart(NamedTuple):
    """Consecutive ops of a segment that run on the same workers and neither move nor exchange tensors. The workers
    replay them as a separate segment, with the id `part_id` and the definition `body`.

    Slots are those of the client's segment. `externals` are the tensors that exist before the part, and `layouts` their
    layouts. `sources` are the externals of the workers' segment: a slot, and the layout of its copy to use, None for
    the tensor itself. `written` are the externals that the part writes to, each with the slot of its last version.
    `outputs` are all slots that the part gives; `results` are those of them that the part does not overwrite.
    Externals in `placed` stay in their layouts from then on.
    """

    part_id: int
    start: int
    end: int
    workers: tuple[int, ...]
    body: SegmentBody
    externals: tuple[int, ...]
    layouts: Layouts
    sources: tuple[tuple[int, ShardingSpec | None], ...]
    written: tuple[tuple[int, int], ...]
    outputs: range
    results: tuple[tuple[int, TensorRecord], ...]
    placed: tuple[int, ...]
    linear: tuple[LinearOp, ...]
    first_scalar: int
    end_scalar: int


class PartVariant(NamedTuple):
    """The consequences for one part of the slots that die in a run. `dead` are the slots that die in the part, as slots
    of the workers' segment, those of copies too. As slots of the client's segment, `freed` are the externals among
    them, `copied` those that have copies, and `gone` all of them, which need no FreeTensors. `results` are the new
    tensors that outlive the part."""

    dead: tuple[int, ...]
    freed: tuple[int, ...]
    copied: tuple[int, ...]
    gone: frozenset[int]
    results: tuple[tuple[int, TensorRecord], ...]


class SplitVariant(NamedTuple):
    """The consequences for all parts of the slots that die in a run: the variant of each part, and the dead slots by
    the position of the last op that uses them. `all_frees` has all of them, `other_frees` those that no part frees."""

    parts: tuple[PartVariant, ...]
    all_frees: Mapping[int, tuple[int, ...]]
    other_frees: Mapping[int, tuple[int, ...]]


@dataclass
class SegmentSplit:
    """The parts of a segment, in order; the ops between them are planned one by one. `variants` has an entry for each
    set of dead slots."""

    parts: tuple[SegmentPart, ...]
    variants: dict[tuple[int, ...], SplitVariant] = field(default_factory=dict, compare=False)


@dataclass
class SegmentRecord:
    """A segment of a client. `nbytes` is the size of all its outputs."""

    segment_id: int
    body: SegmentBody
    nbytes: int
    splits: dict[SegmentKey, SegmentSplit] = field(default_factory=dict)
