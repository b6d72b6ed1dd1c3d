"""A call of a function as data: the instructions it emits, with slots in place of ids, and its effects on tensors of
the program. `gt.compile` records several calls, compares them, and repeats the last one as a ReplayTemplate.

A slot is a place in the table of ids of one call: first the tensors that the call uses and does not make (externals),
then the tensors that it makes, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from gt.client.cached_calls import rebind, wrap_view
from gt.client.compilation.call_recorder import Recording
from gt.client.compilation.call_segments import Build, SegmentedCall, Table, defined_segments, picker
from gt.client.geometry import Geometry
from gt.client.session import Session
from gt.client.storage import Storage, StorageView, TensorRef, ViewPath
from gt.client.tensor import Tensor
from gt.core.errors import CompileError
from gt.core.messages import (
    BeginModule,
    BeginStep,
    DropCopies,
    EndStep,
    Instruction,
    NoteGradient,
    Redistribute,
    RunOp,
)

# The fields of recorded instructions that hold ids; the other fields are the same in every call.
_ID_FIELDS: dict[type[Any], tuple[str, ...]] = {
    RunOp: ("inputs", "outputs"),
    Redistribute: ("input", "output"),
    NoteGradient: ("gradient", "parameter"),
    BeginStep: ("step", "gradients", "parameters"),
    EndStep: ("end",),
    BeginModule: ("parameters", "next_parameters"),
    DropCopies: ("ids",),
}
_OWN_IDS = {BeginStep: "step", EndStep: "end"}  # ids that name no tensor
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
    """One recorded call. `shape` are its instructions with slots in place of ids, and without scalars and sites: calls
    with equal shapes run the same ops on the same tensors. `writes` are the externals that got new ids, with the slots
    of these ids."""

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
        self.shape = [_shape(instruction, slots) for instruction in recording.instructions]

    def difference(self, other: RecordedCall) -> str | None:
        """The first line at which two calls differ, or another difference; None if they differ in scalars only."""
        for position, (mine, others) in enumerate(zip(self.shape, other.shape, strict=False)):
            if mine != others:
                return self.recording.line(position)
        if len(self.shape) != len(other.shape):
            longer = max(self, other, key=lambda each: len(each.shape))
            return longer.recording.line(min(len(self.shape), len(other.shape)))
        if self.sources != other.sources:
            external = next(n for n, (a, b) in enumerate(zip(self.sources, other.sources, strict=False)) if a != b)
            return self.recording.line(list(self.recording.first_use.values())[external])
        if self.writes != other.writes or self.effects != other.effects:
            return "the gradients or the results"
        return None


def _shape(instruction: Instruction, slots: dict[int, int]) -> tuple[Any, ...]:
    kind = type(instruction)
    named = _ID_FIELDS[kind]
    fields: list[Any] = [kind]
    for name in kind.__struct_fields__:
        value = getattr(instruction, name)
        if name in named:
            fields.append(slots[value] if isinstance(value, int) else tuple([slots[ident] for ident in value]))
        elif name not in _VARYING:
            fields.append(value)
    return tuple(fields)


def own_ids(instructions: Sequence[Instruction]) -> list[int]:
    """The ids of a call's instructions that name no tensors."""
    return [getattr(each, _OWN_IDS[type(each)]) for each in instructions if type(each) in _OWN_IDS]


class ReplayTemplate:
    """The instructions of a recorded call for any ids and scalars. `scalar_groups` has, for each op, the position of
    its scalars among the distinct ones that `emit` gets."""

    def __init__(self, recorded: RecordedCall, scalar_groups: Sequence[int], session: Session) -> None:
        self._instructions = recorded.recording.instructions
        self._slots = recorded.slots
        self._dying = [tensor.id for tensor in recorded.recording.collected]
        self.sources = recorded.sources
        self.writes = recorded.writes
        self.effects = recorded.effects
        self._made = len(recorded.slots) - len(recorded.sources)
        self._pick_scalars = picker(scalar_groups)
        self._segmented = self._in_segments(session.matcher.shortest)
        self._is_defined = False

    def _in_segments(self, shortest: int | None) -> SegmentedCall:
        builds = [_builder(instruction, self._slots) for instruction in self._instructions]
        return SegmentedCall(self._instructions, builds, self._slots, self._dying, shortest)

    def emit(self, session: Session, externals: Sequence[Storage], scalars: Sequence[tuple[Any, ...]]) -> Table:
        """Queue the instructions of one call. Returns its table of ids."""

        def build(ids: tuple[int, ...]) -> tuple[Table, Sequence[Instruction]]:
            definitions = () if self._is_defined else self._define(session)
            segments = len(self._segmented.segments)
            session.matcher.count_runs(segments, self._segmented.op_count, new=segments if definitions else 0)
            made = tuple(islice(session.ids, self._made))
            while made and made[-1] - made[0] >= self._made:  # another thread took some between
                made = tuple(islice(session.ids, self._made))
            table = (*ids, *made)
            return table, [*definitions, *self._segmented.instructions(table, self._pick_scalars(scalars))]

        return session.outbox.submit_all(build, externals, self.writes, self._segmented.op_count)

    def _define(self, session: Session) -> Sequence[Instruction]:
        """The instructions that define the segments, sent before the first repetition. If the session has too many
        segments already, none is defined, and the ops are sent one by one."""
        self._is_defined = True
        definitions = defined_segments(session).define(session, self._segmented)
        if definitions is None:
            self._segmented = self._in_segments(None)
        return definitions or ()

    def apply_effects(
        self,
        session: Session,
        table: Table,
        externals: Sequence[Storage],
        tensors: Sequence[Tensor],
        containers: Sequence[Any],
    ) -> Any:
        """Give the tensors of the program their new gradients and storages, and return the results. `containers` are
        those among the arguments, if a result is one of them."""
        storages: dict[int, Storage] = dict(enumerate(externals))
        effects = self.effects

        def ref_of(template: RefTemplate) -> TensorRef:
            storage = storages.get(template.slot)
            if storage is None:
                storage = Storage(session, table[template.slot], template.storage_geometry, template.is_parameter)
                storages[template.slot] = storage
            return storage if template.path is None else StorageView(storage, template.path, template.geometry)

        for position, gradient in effects.gradients:
            tensors[position].grad = None if gradient is None else wrap_view(gradient.kind, ref_of(gradient))
        for position, template in effects.rebound:
            rebind(tensors[position], ref_of(template))
        bumped = [tensors[position] for position, count in effects.versions for _ in range(count)]
        if bumped:
            torch.autograd.graph.increment_version(bumped)
        results: list[Any] = []
        for result in effects.results:
            results.append(_result(result, ref_of, tensors, containers, results))
        return results


def _result(
    result: Any,
    ref_of: Callable[[RefTemplate], TensorRef],
    tensors: Sequence[Tensor],
    containers: Sequence[Any],
    earlier: Sequence[Any],
) -> Any:
    if isinstance(result, RefTemplate):
        return result_handle(result.kind, ref_of(result), result.requires_grad, result.is_leaf)
    if isinstance(result, ReturnedInput):
        return tensors[result.position]
    if isinstance(result, ReturnedGradient):
        return tensors[result.position].grad
    if isinstance(result, ReturnedContainer):
        return containers[result.number]
    return earlier[result.number] if isinstance(result, ReturnedAgain) else result


def result_handle(kind: type[Any], ref: TensorRef, requires_grad: bool, is_leaf: bool) -> torch.Tensor:
    """A handle for a result. A backward through a result that has a graph in the function raises CompileError."""
    if is_leaf:
        return wrap_view(kind, ref).requires_grad_(requires_grad)
    return _WithoutGraph.apply(_anchor(), kind, ref)  # type: ignore[no-any-return]


class _WithoutGraph(torch.autograd.Function):
    """Makes a result that requires a gradient but has no graph, as the results of a skipped call have none."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, kind: type[Any], ref: TensorRef) -> torch.Tensor:
        return wrap_view(kind, ref)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise CompileError(
            "backward through a result of a function of gt.compile, which keeps no graph: call backward inside of the "
            "function, as in `def step(x): loss = model(x).mean(); loss.backward(); return loss`"
        )


def _anchor() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


def _builder(instruction: Instruction, slots: dict[int, int]) -> Build:
    """A function that makes the same instruction with the ids of another table, and with other scalars if it is an
    op."""
    if isinstance(instruction, RunOp):
        op_id, scope, site = instruction.op_id, instruction.scope, instruction.site
        inputs = picker([slots[ident] for ident in instruction.inputs])
        outputs = picker([slots[ident] for ident in instruction.outputs])
        return lambda table, scalars: RunOp(op_id, inputs(table), outputs(table), scalars, scope, site)
    kind = type(instruction)
    fields: list[Callable[[Table], Any]] = []
    for name in kind.__struct_fields__:
        value = getattr(instruction, name)
        if name not in _ID_FIELDS[kind]:
            fields.append(lambda table, value=value: value)  # type: ignore[misc]
        elif isinstance(value, int):
            fields.append(itemgetter(slots[value]))
        else:
            fields.append(picker([slots[ident] for ident in value]))
    return lambda table: kind(*[field(table) for field in fields])  # type: ignore[return-value]
