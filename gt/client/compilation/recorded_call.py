"""A recorded call of a function as data: its instructions, with slots in place of ids, and its effects on tensors of
the program. `gt.compile` records several calls, compares them, and repeats the last one by a ReplayTemplate.

A slot is a place in the table of ids of one call: first the tensors that the call uses and does not make (externals),
then the tensors that it makes, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gt.client.compilation.call_recorder import Recording
from gt.client.storage import Geometry, Storage, ViewPath
from gt.core.messages import (
    BeginModule,
    BeginStep,
    DropCopies,
    EndStep,
    Instruction,
    NoteGradient,
    PlaceTensor,
    Redistribute,
    RunOp,
)

# The fields of recorded instructions that hold ids; the other fields are the same in every call.
ID_FIELDS: dict[type[Any], tuple[str, ...]] = {
    RunOp: ("inputs", "outputs"),
    Redistribute: ("input", "output"),
    NoteGradient: ("gradient", "parameter"),
    BeginStep: ("step", "gradients", "parameters"),
    EndStep: ("end",),
    BeginModule: ("parameters", "next_parameters"),
    DropCopies: ("ids",),
    PlaceTensor: ("id",),
}
_STEP_IDS = {BeginStep: "step", EndStep: "end"}  # ids of steps, which name no tensor
_VARYING = ("scalars", "site")  # fields that may differ between calls


class Source(NamedTuple):
    """The origin of an external. `positions` are those of the tensors that it comes from; the kinds are:

    - `handle`, `grad`: a tensor of the call, or its gradient
    - `plain`: plain tensors of the function's state, all with the same content
    - `count`: plain tensors of an optimizer's state, after its step
    - `constant`: the upload of a plain tensor that the function makes, and plain tensors with the same content
    """

    kind: str
    positions: tuple[int, ...]
    constant: Storage | None = None


class RefTemplate(NamedTuple):
    """A tensor that exists after a call: its storage by slot, and the view of it."""

    slot: int
    path: ViewPath | None
    geometry: Geometry
    storage_geometry: Geometry
    kind: type[Any]
    requires_grad: bool
    is_parameter: bool
    is_leaf: bool


class ReturnedInput(NamedTuple):
    """A result that is one of the tensors of the call itself."""

    position: int


class ReturnedGradient(NamedTuple):
    """A result that is the gradient of one of the tensors of the call."""

    position: int


class ReturnedContainer(NamedTuple):
    """A result that is one of the containers among the arguments of the call."""

    number: int


class ReturnedAgain(NamedTuple):
    """A result that is the same object as an earlier result."""

    number: int


class Effects(NamedTuple):
    """The effects of a call besides new values. By position of a tensor of the call: new gradients (None: reset), new
    storages (`rebound`), and the number of writes that autograd counts (`versions`); then the results."""

    gradients: tuple[tuple[int, RefTemplate | None], ...]
    rebound: tuple[tuple[int, RefTemplate], ...]
    versions: tuple[tuple[int, int], ...]
    results: tuple[Any, ...]
    structure: Any


class RecordedCall:
    """One recorded call. `normalized` are its instructions with slots in place of ids, and without scalars and
    sites: calls whose normalized instructions are equal run the same ops on the same tensors. `writes` are the
    externals that got new ids, with the slots of these ids."""

    def __init__(
        self,
        recording: Recording,
        sources: list[Source],
        slots: dict[int, int],
        writes: tuple[tuple[int, int], ...],
        effects: Effects,
    ) -> None:
        self.recording = recording
        self.sources = sources
        self.writes = writes
        self.effects = effects
        self.slots = slots
        self.normalized = [_normalized(instruction, slots) for instruction in recording.instructions]

    def difference(self, other: RecordedCall) -> str | None:
        """The first line at which two calls differ, or another difference; None if they differ in scalars only."""
        for position, (mine, others) in enumerate(zip(self.normalized, other.normalized, strict=False)):
            if mine != others:
                return self.recording.line(position)
        if len(self.normalized) != len(other.normalized):
            longer = max(self, other, key=lambda each: len(each.normalized))
            return longer.recording.line(min(len(self.normalized), len(other.normalized)))
        if self.sources != other.sources:
            external = next(n for n, (a, b) in enumerate(zip(self.sources, other.sources, strict=False)) if a != b)
            return self.recording.line(list(self.recording.first_use.values())[external])
        if self.writes != other.writes or self.effects != other.effects:
            return "the gradients or the results"
        return None


def _normalized(instruction: Instruction, slots: dict[int, int]) -> tuple[Any, ...]:
    kind = type(instruction)
    named = ID_FIELDS[kind]
    fields: list[Any] = [kind]
    for name in kind.__struct_fields__:
        value = getattr(instruction, name)
        if name in named:
            fields.append(slots[value] if isinstance(value, int) else tuple([slots[ident] for ident in value]))
        elif name not in _VARYING:
            fields.append(value)
    return tuple(fields)


def step_ids(instructions: Sequence[Instruction]) -> list[int]:
    """The ids that a call's instructions give to steps of optimizers."""
    return [getattr(each, _STEP_IDS[type(each)]) for each in instructions if type(each) in _STEP_IDS]
