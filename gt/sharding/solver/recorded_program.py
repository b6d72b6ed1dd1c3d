"""One step of a program as ops on named values, made from its instruction stream.

Values are immutable: an op that writes gives a new value of the same storage. Views are separate ops. A foreach op,
or a fused optimizer, is one op for each position of its lists, since these are independent of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from gt.core.messages import (
    BeginModule,
    BeginStep,
    CreateTensor,
    EndStep,
    Instruction,
    NoteGradient,
    Queried,
    Redistribute,
    RunOp,
)
from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Input, PolicyRecord, Signature, ViewStep
from gt.sharding.foreach_subsets import first_list_inputs, is_one_by_one, subset_of
from gt.sharding.op_calls import OpCall, functional_args, inputs_in, with_inputs
from gt.sharding.program_builder import view_call
from gt.sharding.program_trace import ProgramTrace, TracedOp
from gt.sharding.spec import ShardingSpec

ENTER, LEAVE, INPUT, OUTPUT, GRADIENT = "enter", "leave", "input", "output", "gradient"


class ModuleMark(NamedTuple):
    """A point of the stream, before the instruction at `position`, at which something happened to a module.

    - `kind`: the module begins or ends its forward (enter, leave); the tensor `ident`, or the view of it that `view`
      makes, is an input of the model (input), a result of the module (output), or the gradient of a result (gradient)
    - `meta`: that of the input, result or gradient
    - `dead`: the tensors that are freed if an instruction is sent here
    """

    position: int
    kind: str
    module: str
    ident: int = 0
    view: tuple[ViewStep, ...] = ()
    meta: TensorMeta | None = None
    dead: tuple[int, ...] = ()


class RecordedSteps(NamedTuple):
    """Some steps of a program, which are the same but for their scalars. `starts` are the positions of their first
    instructions, and `mark_starts` the numbers of their first marks: one step may end where the next one begins.

    - `signatures`: the ops, by id
    - `metas`: the tensors that the stream names, by id
    - `layouts`: those that some tensors had before the first step, by id
    - `parameters`: the ids of parameters and buffers before the first step, by name; tied ones have several names
    - `states`: the ids of an optimizer's state that existed before, with the ids of the parameters that they belong to
    - `owners`: the modules that have their own parameters and buffers, with the names of these
    - `sites`: lines of the program, by id
    - `scopes`: signal scopes, by id: the name and the policy
    - `answers`: those of the queries, by request
    """

    instructions: tuple[Instruction, ...]
    starts: tuple[int, ...]
    mark_starts: tuple[int, ...]
    marks: tuple[ModuleMark, ...]
    signatures: Mapping[int, Signature]
    metas: Mapping[int, TensorMeta]
    layouts: Mapping[int, ShardingSpec]
    parameters: Mapping[str, int]
    states: Mapping[int, int]
    owners: Mapping[str, tuple[str, ...]]
    sites: Mapping[int, str]
    scopes: Mapping[int, tuple[str, PolicyRecord | None]]
    answers: Mapping[int, Queried]


PARAMETER, STATE, DATA, ACTIVATION, GRADIENT_OF = "parameter", "state", "data", "activation", "gradient"


class RecordedOp(NamedTuple):
    """A call with the names of its values.

    - `written`: per output, the value whose storage it is written to, or an empty text
    - `module`: the module whose forward or backward it belongs to; empty outside of the model
    - `position`: of its instruction in the stream
    - `is_view`: it computes nothing
    - `in_update`: it is part of an optimizer's step
    """

    call: OpCall
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    written: tuple[str, ...]
    scope: int
    site: int
    module: str
    position: int
    is_view: bool = False
    in_update: bool = False


class Boundary(NamedTuple):
    """A value that is an input of the model, a result of a module, or the gradient of one. `value` is the storage,
    `view` the value as the module sees it."""

    kind: str
    module: str
    value: str
    view: str
    position: int


class RecordedProgram(NamedTuple):
    """The ops of a step in the order of execution.

    - `values`: the meta of each named value
    - `roles`: parameter, state (kept from step to step, as that of an optimizer), data, gradient or activation
    - `gradients`: the values that are gradients of parameters, with the names of these
    - `names`: all names of each parameter; tied ones have several
    - `boundaries`: where values pass between modules
    - `kept`: values that exist before the step and those that they become, if the step writes to them
    """

    values: Mapping[str, TensorMeta]
    ops: tuple[RecordedOp, ...]
    roles: Mapping[str, str]
    gradients: Mapping[str, str]
    names: Mapping[str, tuple[str, ...]]
    boundaries: tuple[Boundary, ...]
    kept: Mapping[str, str]

    @property
    def trace(self) -> ProgramTrace:
        """The program as propagation sees it: without writes through views, which no rule describes."""
        ops = [TracedOp(op.call, op.inputs, op.outputs) for op in self.ops if op.call.op]
        return ProgramTrace(self.values, tuple(ops))


def program_of(steps: RecordedSteps) -> RecordedProgram:
    """The last of some recorded steps."""
    return _ProgramReader(steps).read()


class _ProgramReader:
    """Reads the instructions of a step. `_current` are the names of the present values of tensors, by id."""

    def __init__(self, steps: RecordedSteps) -> None:
        self._steps = steps
        self._values: dict[str, TensorMeta] = {}
        self._ops: list[RecordedOp] = []
        self._roles: dict[str, str] = {}
        self._gradients: dict[str, str] = {}
        self._boundaries: list[Boundary] = []
        self._current: dict[int, str] = {}
        self._origin: dict[str, str] = {}  # the value before the step, by written value
        self._views: dict[tuple[str, bytes], str] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._stack: list[str] = []
        self._backward = ""
        self._in_update = False
        self._position = 0
        self._count = 0
        self._parameter_of = self._trace_parameters()

    def _trace_parameters(self) -> dict[int, tuple[str, ...]]:
        """The names of parameters by their ids at the beginning of the last step: earlier steps gave them new ids."""
        names: dict[int, tuple[str, ...]] = {}
        for name, ident in self._steps.parameters.items():
            names[ident] = (*names.get(ident, ()), name)
        for instruction in self._steps.instructions[: self._steps.starts[-1]]:
            if isinstance(instruction, RunOp):
                signature = self._steps.signatures[instruction.op_id]
                versions = instruction.outputs[len(signature.outputs) :]
                for position, version in zip(signature.writes, versions, strict=True):
                    if instruction.inputs[position] in names:
                        names[version] = names.pop(instruction.inputs[position])
        return names

    def read(self) -> RecordedProgram:
        start = self._steps.starts[-1]
        pending = list(self._steps.marks[self._steps.mark_starts[-1] :])
        for position in range(start, len(self._steps.instructions) + 1):
            self._position = position
            while pending and pending[0].position == position:
                self._mark(pending.pop(0))
            if position < len(self._steps.instructions):
                self._instruction(self._steps.instructions[position])
        roles = {value: self._roles.get(value, ACTIVATION) for value in self._values}
        return RecordedProgram(
            self._values,
            tuple(self._ops),
            roles,
            self._gradients,
            self._names,
            tuple(self._boundaries),
            {origin: value for value, origin in self._origin.items()},
        )

    # Marks and instructions

    def _mark(self, mark: ModuleMark) -> None:
        if mark.kind == ENTER:
            self._stack.append(mark.module)
            if not mark.module:  # the model begins, so backward has ended
                self._backward = ""
        elif mark.kind == LEAVE:
            self._stack.pop()
        else:
            value = self._value(mark.ident)
            if mark.kind == INPUT and self._roles.get(value) is None:
                self._roles[value] = DATA
            view = self._view(value, mark.view)
            self._boundaries.append(Boundary(mark.kind, mark.module, value, view, self._position))
            if mark.kind == GRADIENT_OF:
                self._backward = mark.module

    def _instruction(self, instruction: Instruction) -> None:
        if isinstance(instruction, RunOp):
            self._run(instruction)
        elif isinstance(instruction, CreateTensor):
            self._current[instruction.id] = self._new(instruction.meta)
            self._roles[self._current[instruction.id]] = DATA
        elif isinstance(instruction, Redistribute):
            self._current[instruction.output] = self._value(instruction.input)
        elif isinstance(instruction, NoteGradient):
            gradient, parameter = self._value(instruction.gradient), self._value(instruction.parameter)
            self._gradients[gradient] = parameter
            self._roles[gradient] = GRADIENT_OF
        elif isinstance(instruction, BeginStep | EndStep):
            self._in_update = isinstance(instruction, BeginStep)
        elif isinstance(instruction, BeginModule):
            pass

    def _run(self, run: RunOp) -> None:
        signature = self._steps.signatures[run.op_id]
        if is_one_by_one(signature) and (count := len(first_list_inputs(signature))) > 1:
            for position in range(count):
                subset = subset_of(signature, (position,))
                inputs = [run.inputs[each] for each in subset.inputs]
                self._call(run, subset.signature, inputs, [run.outputs[each] for each in subset.outputs])
        else:
            self._call(run, signature, run.inputs, run.outputs)

    def _call(self, run: RunOp, signature: Signature, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        bases = [self._value(ident) for ident in inputs]
        used = [self._view(base, path) for base, path in zip(bases, signature.paths, strict=True)]
        call, order = self._functional(signature, used)
        names = [self._new(meta) for meta in signature.outputs]
        written = [""] * len(names)
        for position in signature.writes:
            names.append(self._new(self._values[used[position]].dense()))
            written.append(bases[position] if not signature.paths[position] else "")
        operands = tuple([used[position] for position in order])
        self._add(RecordedOp(call, operands, tuple(names), tuple(written), run.scope, run.site, *self._place()))
        made = list(names[: len(signature.outputs)])
        for position, name in zip(signature.writes, names[len(signature.outputs) :], strict=True):
            made.append(self._written(bases[position], name, bool(signature.paths[position])))
        for ident, name in zip(outputs, made, strict=True):
            self._current[ident] = name

    def _written(self, base: str, value: str, is_view: bool) -> str:
        """The new value of a storage to which `value` is written, in whole or through a view."""
        if is_view:
            meta = self._values[base]
            call = OpCall("", (Input(0), Input(1)), {}, (meta, self._values[value]), (meta,))
            whole = self._new(meta)
            self._add(RecordedOp(call, (base, value), (whole,), (base,), 0, 0, *self._place(), is_view=True))
            value = whole
        if self._roles.get(base) in (PARAMETER, STATE):
            self._roles[value] = self._roles[base]
            self._origin[value] = self._origin.pop(base, base)
        return value

    def _place(self) -> tuple[str, int]:
        module = self._stack[-1] if self._stack else self._backward if not self._in_update else ""
        return module, self._position

    def _add(self, op: RecordedOp) -> None:
        self._ops.append(op._replace(in_update=self._in_update and not op.is_view))

    def _functional(self, signature: Signature, used: Sequence[str]) -> tuple[OpCall, list[int]]:
        """An op without its writes, and the positions of its inputs among those of the signature."""
        metas = [self._values[name] for name in used]
        if not signature.writes:
            call = OpCall(
                signature.op, signature.args, signature.kwargs, tuple(metas), signature.outputs, signature.positions
            )
            return call, list(range(len(used)))
        only_written = frozenset([value.index for value in inputs_in((), signature.kwargs)]) & {*signature.writes}
        order = [position for position in range(len(used)) if position not in only_written]
        numbers = {position: number for number, position in enumerate(order)}
        args, kwargs = functional_args(signature.args, signature.kwargs, only_written)

        def renumber(value: Input) -> Arg:
            return Input(numbers[value.index])

        written = [metas[position].dense() for position in signature.writes]
        call = OpCall(
            signature.functional or signature.op,
            tuple([with_inputs(arg, renumber) for arg in args]),
            {name: with_inputs(arg, renumber) for name, arg in kwargs.items()},
            tuple([metas[position] for position in order]),
            (*signature.outputs, *written),
        )
        return call, order

    # Values

    def _value(self, ident: int) -> str:
        """The name of a tensor's present value. One that the step has not made exists before it: a parameter, or kept
        from an earlier step."""
        if ident not in self._current:
            names = self._parameter_of.get(ident, ())
            value = self._new(self._steps.metas[ident], names[0] if names else "")
            self._roles[value] = PARAMETER if names else STATE
            if names:
                self._names[value] = names
            self._current[ident] = value
        return self._current[ident]

    def _view(self, base: str, steps: Sequence[ViewStep]) -> str:
        for step in steps:
            key = (base, msgspec.msgpack.encode(step))
            if key not in self._views:
                call, pick = view_call(step, self._values[base])
                names = tuple([self._new(meta) for meta in call.outputs])
                self._add(RecordedOp(call, (base,), names, ("",) * len(names), 0, 0, *self._place(), is_view=True))
                for other, name in enumerate(names):
                    picked = msgspec.msgpack.encode(msgspec.structs.replace(step, pick=step.pick and other))
                    self._views.setdefault((base, picked), name)
                self._views[key] = names[pick]
            base = self._views[key]
        return base

    def _new(self, meta: TensorMeta, name: str = "") -> str:
        self._count += not name
        value = name or f"%{self._count}"
        self._values[value] = meta
        return value
