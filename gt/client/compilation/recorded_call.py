"""A recorded call of a function as data: its instructions, with slots in place of ids, and its effects on tensors of
the program. `gt.compile` records several calls, compares them, and repeats the last one by a ReplayTemplate.

A slot is a place in the table of ids of one call: first the tensors that the call uses and does not make (externals),
then the tensors that it makes, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from gt.client.compilation.call_recorder import Recording
from gt.client.storage import Geometry, Storage, ViewPath
from gt.core.message_fields import id_fields
from gt.core.messages import (
    BeginStep,
    EndStep,
    Instruction,
    RunOp,
)
from gt.core.signatures import Signature

_STEP_IDS = {BeginStep: "step", EndStep: "end"}  # ids of steps, which name no tensor
_VARYING = ("scalars", "site")  # fields that may differ between calls


class Source(NamedTuple):
    """The origin of an external. `positions` are those of the tensors that it comes from; the kinds are:

    - `handle`, `grad`: a tensor of the call, or its gradient
    - `plain`: plain tensors of the function's state, all with the same content
    - `count`: plain tensors of an optimizer's state, after its step
    - `constant`: the upload of a plain tensor that the function makes, and plain tensors with the same content, whose
      hash is `content` if it is known
    """

    kind: str
    positions: tuple[int, ...]
    constant: Storage | None = None
    content: bytes | None = None

    def is_like(self, other: Source) -> bool:
        """Whether two calls use the same tensor, or constants with the same content."""
        is_same = self.content == other.content and (self.content is not None or self.constant is other.constant)
        return (self.kind, self.positions) == (other.kind, other.positions) and is_same


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
        self.normalized = [_normalized(each, slots, recording.session.signatures) for each in recording.instructions]

    def difference(self, before: RecordedCall, *, of_hints: bool = True) -> str | None:
        """The first difference from an earlier call, with its line; None if the calls differ in scalars only. Without
        `of_hints` they may differ in hints too."""
        recording = self.recording
        mine = [(n, each) for n, each in enumerate(self.normalized) if of_hints or not each[0].is_hint]
        others = [(n, each) for n, each in enumerate(before.normalized) if of_hints or not each[0].is_hint]
        if [each for _, each in mine] != [each for _, each in others]:
            ends = (len(self.normalized), None), (len(before.normalized), None)
            pairs = zip_longest(mine, others, fillvalue=None)
            found = next((now, then) for now, then in pairs if now is None or then is None or now[1] != then[1])
            (position, _), (other, _) = (each or end for each, end in zip(found, ends, strict=True))
            line = recording.line(position) if found[0] else before.recording.line(other)
            now, then = self._describe(position), before._describe(other)
            if now == then:
                now, then = f"{now} of other tensors or with other constants", "those of the recorded call"
            return f"{line}: {now} in place of {then}"
        for number, (source, former) in enumerate(zip(self.sources, before.sources, strict=False)):
            if not source.is_like(former):
                position = list(recording.first_use.values())[number] if number < len(recording.first_use) else 0
                return f"{recording.line(position)}: {self._describe(position)} uses another tensor or constant"
        if self.writes != before.writes or self.effects[:-2] != before.effects[:-2]:
            return "it gives other gradients, or writes to other tensors"
        for now, then in zip(self.effects.results, before.effects.results, strict=False):
            if now != then:
                is_constant = not isinstance(now, tuple) and not isinstance(then, tuple)
                return f"it returns {now!r} in place of {then!r}" if is_constant else "it returns another tensor"
        return "it returns another structure" if self.effects != before.effects else None

    def _describe(self, position: int) -> str:
        """An instruction for a message."""
        if position >= len(self.normalized):
            return "the end of the call"
        instruction, (kind, *fields) = self.recording.instructions[position], self.normalized[position]
        if not isinstance(instruction, RunOp) or not isinstance(fields[0], Signature):
            return str(kind.__name__)
        scalars = ", ".join(map(str, instruction.scalars))
        return f"{fields[0].op}({scalars}) -> {', '.join(map(str, fields[0].outputs)) or 'in place'}"


def _normalized(
    instruction: Instruction, slots: dict[int, int], signatures: Mapping[int, Signature]
) -> tuple[Any, ...]:  # fmt: skip
    kind = type(instruction)
    named = id_fields(kind).tensor_names
    fields: list[Any] = [kind]
    for name in kind.__struct_fields__:
        value = getattr(instruction, name)
        if name in named:
            fields.append(slots[value] if isinstance(value, int) else tuple([slots[ident] for ident in value]))
        elif name == "op_id":  # ops with the same signature may have several ids
            fields.append(signatures.get(value, value))
        elif name not in _VARYING:
            fields.append(value)
    return tuple(fields)


def step_ids(instructions: Sequence[Instruction]) -> list[int]:
    """The ids that a call's instructions give to steps of optimizers."""
    return [getattr(each, _STEP_IDS[type(each)]) for each in instructions if type(each) in _STEP_IDS]
