"""Builds worker programs: op calls on shards, moves between layouts, and views.

A worker program works on numbered registers, each of which holds a tensor in one layout. Every worker of the mesh runs
the same program and derives its own part from the layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.signatures import (
    AlgorithmRequest,
    Compute,
    Input,
    Move,
    OpProgram,
    OpProgramStep,
    Refuse,
    Signature,
    ViewStep,
    Whole,
    WriteBack,
)
from gt.sharding.considered_strategies import NotedCall
from gt.sharding.constraints import Target
from gt.sharding.cost import reshard_bytes
from gt.sharding.lowering import NoRule, infer_output_sharding
from gt.sharding.op_calls import Expansion, OpCall, has_scalars, inputs_in, with_inputs
from gt.sharding.rules import entry_of
from gt.sharding.rules.entry import LayOut
from gt.sharding.schedule_programs import choose_schedule, sum_rounds
from gt.sharding.schedules import Algorithm
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.sharding.strategies import OpOperand, OpStrategy
from gt.sharding.strategy_choice import Choice, moved_bytes


def drop_unused(steps: Sequence[OpProgramStep], gives: Sequence[int]) -> list[OpProgramStep]:
    """The steps that write to a tensor, or whose results are used: by another step or as a result of the program."""
    if any(isinstance(step, WriteBack) for step in steps):
        return list(steps)  # a WriteBack names steps by number, so none may be dropped
    used = set(gives)
    kept: list[OpProgramStep] = []
    for step in reversed(steps):
        if _has_side_effect(step) or used.intersection(registers_given(step)):
            used.update(registers_read(step))
            kept.append(step)
    return kept[::-1]


def registers_read(step: OpProgramStep) -> tuple[int, ...]:
    if isinstance(step, Move):
        return (step.input,)
    if isinstance(step, WriteBack):
        return (step.base, step.view)
    if isinstance(step, Refuse):
        return ()
    return (*step.inputs, *(register for register in getattr(step, "into", ()) if register >= 0))


def registers_given(step: OpProgramStep) -> tuple[int, ...]:
    if isinstance(step, WriteBack):
        return ()
    return (step.output,) if isinstance(step, Move) else step.outputs


def _has_side_effect(step: OpProgramStep) -> bool:
    """Whether a step overwrites a tensor that existed before."""
    if isinstance(step, Whole):
        return bool(step.signature.writes)
    return isinstance(step, Compute) and any(register >= 0 for register in step.into)


class Register(NamedTuple):
    """A tensor of a program and its layout. `copies` are the layouts of copies that exist: moves to them are free."""

    meta: TensorMeta
    spec: ShardingSpec
    copies: tuple[ShardingSpec, ...] = ()


class InPlaceWrite(NamedTuple):
    """How an op writes to its arguments.

    - `into`: per output of the call, the register that it is written to, or -1
    - `in_place`: the op as the user called it
    - `out_registers`: inputs of `in_place` that follow those of the call: arguments that are only written to
    """

    into: tuple[int, ...]
    in_place: Signature
    out_registers: tuple[int, ...] = ()


class ProgramBuilder:
    """A program under construction, on one mesh.

    - `hoisted`: (input, layout) to register, for moves of inputs: the caller moves them before the program and may
      reuse a copy in that layout
    - `fixed`: inputs that the program writes to; their moves are not hoisted
    - `reduces_first`: ops neither take nor give partial values
    - `algorithm`: the algorithm that the op is to use, if the user named one
    - `noted`: gets the calls of the program with their strategies; None if nobody asks for them
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        inputs: Sequence[Register],
        fixed: Collection[int] = (),
        *,
        reduces_first: bool = False,
        algorithm: AlgorithmRequest | None = None,
        noted: list[NotedCall] | None = None,
    ) -> None:
        self.mesh = mesh
        self.registers = list(inputs)
        self.steps: list[OpProgramStep] = []
        self.hoisted: dict[tuple[int, ShardingSpec], int] = {}
        self.bytes = 0
        self.results: tuple[int, ...] = ()
        self._view_origins: dict[int, tuple[OpCall, int, int]] = {}  # view to call, base register, position of result
        self._inputs = len(inputs)
        self._fixed = frozenset(fixed)
        self.reduces_first = reduces_first
        self.algorithm = algorithm
        self.noted = noted

    def fork(self) -> ProgramBuilder:
        """A copy for trying out an alternative."""
        noted = None if self.noted is None else list(self.noted)
        other = ProgramBuilder(
            self.mesh,
            self.registers,
            self._fixed,
            reduces_first=self.reduces_first,
            algorithm=self.algorithm,
            noted=noted,
        )
        other.steps, other.hoisted, other.bytes = list(self.steps), dict(self.hoisted), self.bytes
        other._view_origins, other._inputs = dict(self._view_origins), self._inputs
        return other

    def adopt(self, other: ProgramBuilder) -> None:
        """Continue from the state of a fork."""
        self.registers, self.steps, self.hoisted = other.registers, other.steps, other.hoisted
        self.bytes, self._view_origins = other.bytes, other._view_origins
        if self.noted is not None and other.noted is not None:
            self.noted[:] = other.noted

    def spec(self, register: int) -> ShardingSpec:
        return self.registers[register].spec

    # Moves

    def move(self, register: int, target: ShardingSpec, *, hoists: bool = True) -> int:
        """A register with the same tensor in the target layout. With `hoists` an input is moved before the program."""
        meta, source, copies = self.registers[register]
        if source is target:
            return register
        if register in self._view_origins:
            moved_view = self._move_base(register, target)
            if moved_view is not None:
                return moved_view
        hoistable = hoists and register < self._inputs and register not in self._fixed
        if hoistable and (register, target) in self.hoisted:
            return self.hoisted[register, target]
        if target not in copies:
            self.bytes += reshard_bytes(meta.shape, ITEM_BYTES[meta.dtype], source, target)
        moved = self._new(meta, target)
        if hoistable:
            self.hoisted[register, target] = moved
        else:
            self.steps.append(Move(register, moved, meta, source.record(), target.record()))
        return moved

    def _move_base(self, register: int, target: ShardingSpec) -> int | None:
        """Move the base of a view and view the moved base, if that costs no more: a copy of the base may exist already
        or be used again."""
        call, base, pick = self._view_origins[register]
        targets = [target if position == pick else None for position in range(len(call.outputs))]
        choice = infer_output_sharding(call, [self.spec(base)], self.mesh, targets, [self.registers[base].copies])
        meta, source, _ = self.registers[register]
        direct = reshard_bytes(meta.shape, ITEM_BYTES[meta.dtype], source, target)
        if choice.strategy.results[pick] is not target or choice.bytes > direct:
            return None
        return self.compute(call, (base,), choice.strategy, is_view=True)[pick]

    def _new(self, meta: TensorMeta, spec: ShardingSpec) -> int:
        self.registers.append(Register(meta, spec))
        return len(self.registers) - 1

    # Ops

    def reshard_inputs(self, registers: Sequence[int], strategy: OpStrategy) -> tuple[int, ...]:
        return tuple([self.move(register, spec) for register, spec in zip(registers, strategy.operands, strict=True)])

    def apply(
        self,
        call: OpCall,
        registers: Sequence[int],
        targets: Sequence[Target] = (),
        *,
        random: bool = False,
        default_dtype: str = "float32",
    ) -> tuple[int, ...]:
        """Emit an op by the cheapest strategy of its rule, or expanded into several ops if that moves fewer bytes."""
        choice = self.choose(call, registers, targets)
        if isinstance(choice, ProgramBuilder):
            self.adopt(choice)
            return choice.results
        return self.compute(call, registers, choice.strategy, random=random, default_dtype=default_dtype)

    def choose(self, call: OpCall, registers: Sequence[int], targets: Sequence[Target]) -> Choice | ProgramBuilder:
        """The best strategy of the op's rule; or a fork that has the steps of the op's expansion, or of one of its
        schedules, and their `results`."""
        choice = self._choose(call, registers, targets)
        if self.noted is not None and isinstance(choice, Choice):
            own = [self.registers[register] for register in registers]
            specs, copies = tuple([each.spec for each in own]), tuple([each.copies for each in own])
            self.noted.append(NotedCall(call, specs, copies, tuple(targets), self.reduces_first, choice))
        return choice

    def _choose(self, call: OpCall, registers: Sequence[int], targets: Sequence[Target]) -> Choice | ProgramBuilder:
        specs = [self.spec(register) for register in registers]
        entry = entry_of(call.op)
        if entry is not None and entry.lay_out is not None:
            return self._lay_out(entry.lay_out, call, registers, targets)
        if entry is not None and entry.algorithms:
            return self._choose_schedule(entry.algorithms, call, registers, targets)
        expansion = entry.expand(call, specs) if entry is not None and entry.expand is not None else None
        try:
            copies = [self.registers[register].copies for register in registers]
            choice = infer_output_sharding(call, specs, self.mesh, targets, copies, self.reduces_first)
        except NoRule:
            if expansion is None:
                raise
            choice = None
        if expansion is None or (choice is not None and not choice.bytes):
            assert choice is not None
            return choice
        trial = self.fork()
        trial.results = trial.expand(expansion, registers, call.outputs, targets)
        return trial if choice is None or trial.bytes - self.bytes < choice.bytes else choice

    def _choose_schedule(
        self, algorithms: Mapping[str, Algorithm], call: OpCall, registers: Sequence[int], targets: Sequence[Target]
    ) -> Choice | ProgramBuilder:
        own = [self.registers[register] for register in registers]
        schedule = choose_schedule(self, algorithms, call, registers, targets)
        if len(schedule.rounds) == 1:
            operands = [OpOperand(meta.shape, ITEM_BYTES[meta.dtype], spec, copies) for meta, spec, copies in own]
            moved = sum(map(moved_bytes, operands, schedule.rounds[0]))
            return Choice(OpStrategy(schedule.rounds[0], (schedule.result,), {}), moved)
        trial = self.fork()
        trial.results = (sum_rounds(trial, call, registers, schedule),)
        return trial

    def _lay_out(self, lay_out: LayOut, call: OpCall, registers: Sequence[int], targets: Sequence[Target]) -> Choice:
        """The strategy that the op's entry chooses itself."""
        own = [self.registers[register] for register in registers]
        operands = [OpOperand(meta.shape, ITEM_BYTES[meta.dtype], spec, copies) for meta, spec, copies in own]
        strategy = lay_out(call, operands, list(targets) or [None] * len(call.outputs), self.mesh)
        if strategy is None:
            raise NoRule(call.op)
        return Choice(strategy, sum(map(moved_bytes, operands, strategy.operands)))

    def compute(
        self,
        call: OpCall,
        registers: Sequence[int],
        strategy: OpStrategy,
        *,
        random: bool = False,
        default_dtype: str = "float32",
        write: InPlaceWrite | None = None,
        is_view: bool = False,
        casts: bool = False,
    ) -> tuple[int, ...]:
        """Emit a call by a strategy, after moves of its inputs; returns the registers of its outputs."""
        inputs = self.reshard_inputs(registers, strategy)
        into = write.into if write is not None else ()
        outputs = tuple(
            [
                into[position] if into and into[position] >= 0 else self._new(meta, spec)
                for position, (meta, spec) in enumerate(zip(call.outputs, strategy.results, strict=True))
            ]
        )
        out_registers = write.out_registers if write is not None else ()
        self.steps.append(
            Compute(
                call.op,
                call.args,
                dict(call.kwargs),
                (*inputs, *out_registers),
                outputs,
                call.inputs,
                call.outputs,
                tuple([spec.record() for spec in strategy.operands]),
                tuple([spec.record() for spec in strategy.results]),
                into,
                write.in_place if write is not None else None,
                random,
                default_dtype,
                is_view,
                casts,
                call.output_positions,
            )
        )
        return outputs

    def expand(
        self,
        expansion: Expansion,
        registers: Sequence[int],
        outputs: Sequence[TensorMeta],
        targets: Sequence[Target] = (),
    ) -> tuple[int, ...]:
        """Emit the calls of an expansion. Its results have the memory format of `outputs`, and its calls are laid out
        for the `targets` of the results."""
        own = list(registers)
        result_metas = dict(zip(expansion.results, outputs, strict=True))
        wanted = dict(zip(expansion.results, targets, strict=False))
        for expanded in expansion.calls:
            used = list(dict.fromkeys(value.index for value in inputs_in(expanded.args, expanded.kwargs)))
            positions = {register: position for position, register in enumerate(used)}
            args = tuple([with_inputs(arg, lambda value: Input(positions[value.index])) for arg in expanded.args])
            kwargs = {
                name: with_inputs(arg, lambda value: Input(positions[value.index]))
                for name, arg in expanded.kwargs.items()
            }
            metas = tuple([self.registers[own[register]].meta for register in used])
            made = tuple([result_metas.get(index, meta) for index, meta in enumerate(expanded.outputs, len(own))])
            call = OpCall(expanded.op, args, kwargs, metas, made, expanded.output_positions)
            made_targets = [wanted.get(index) for index in range(len(own), len(own) + len(made))]
            own.extend(self.apply(call, [own[register] for register in used], made_targets))
        return tuple([own[register] for register in expansion.results])

    def emit_whole(self, signature: Signature, registers: Sequence[int]) -> tuple[int, ...]:
        """Emit an op as the user called it, on whole operands, and moves of the written ones back to their layouts. A
        register that is passed twice is one tensor for the op, which may write to several views of it."""
        moved = {
            register: self.move(register, whole(self.mesh, len(self.registers[register].meta.shape)))
            for register in dict.fromkeys(registers)
        }
        needed = [moved[register] for register in registers]
        outputs = [self._new(meta, whole(self.mesh, len(meta.shape))) for meta in signature.outputs]
        self.steps.append(Whole(signature, tuple(needed), tuple(outputs)))
        for position in signature.writes:
            before = self.spec(registers[position])
            keeps = before if not before.partial and before.mesh is self.mesh else self.spec(needed[position])
            outputs.append(self.move(needed[position], keeps))
        return tuple(outputs)

    def refuse(self, signature: Signature, reason: str) -> tuple[int, ...]:
        """Emit a step that fails the op on all workers."""
        metas = [*signature.outputs, *[self.registers[position].meta for position in signature.writes]]
        outputs = tuple([self._new(meta, whole(self.mesh, len(meta.shape))) for meta in metas])
        self.steps.append(Refuse(signature.op, reason, outputs))
        return outputs

    # Views

    def view(self, register: int, steps: Sequence[ViewStep]) -> int:
        """The register of a view. Moves the tensor before a view op that cannot carry its layout."""
        for step in steps:
            call, pick = view_call(step, self.registers[register].meta)
            choice = infer_output_sharding(call, [self.spec(register)], self.mesh)
            made = self.compute(call, (register,), choice.strategy, is_view=True)[pick]
            self._view_origins[made] = (call, register, pick)
            copies = self._copies_of_view(call, pick, self.registers[register].copies)
            self.registers[made] = self.registers[made]._replace(copies=copies)
            register = made
        return register

    def _copies_of_view(self, call: OpCall, pick: int, copies: Sequence[ShardingSpec]) -> tuple[ShardingSpec, ...]:
        """The layouts that a view has in the copies of its base."""
        choices = [infer_output_sharding(call, [spec], self.mesh).strategy for spec in copies if spec.mesh is self.mesh]
        return tuple([choice.results[pick] for choice in choices if choice.operands[0] in copies])

    def view_in_place(self, register: int, steps: Sequence[ViewStep]) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """The register of a view that shares memory with the shards of its base, and (number, position of the result)
        of each step that makes it. None if some step would have to move or copy."""
        made = []
        for step in steps:
            call, pick = view_call(step, self.registers[register].meta)
            before = self.spec(register)
            try:
                choice = infer_output_sharding(call, [before], self.mesh)
            except NoRule:
                return None
            results = choice.strategy.results
            if choice.strategy.operands[0] is not before or any(spec.partial != before.partial for spec in results):
                return None
            made.append((len(self.steps), pick))
            register = self.compute(call, (register,), choice.strategy, is_view=True)[pick]
        return register, tuple(made)

    def write_back(self, base: int, view: int, steps: tuple[tuple[int, int], ...]) -> None:
        """Emit a copy of a written view into its base, for workers on which the two do not share memory."""
        self.steps.append(WriteBack(base, view, steps))

    # The finished program

    @property
    def assumes_linearity(self) -> bool:
        """Whether partial values pass through an op with scalars that change from call to call: the program is then
        right only for scalars with which the op is linear."""
        return any(
            any(spec.partial for spec in (*step.operand_specs, *step.result_specs))
            and has_scalars(step.args, step.kwargs)
            for step in self.steps
            if isinstance(step, Compute)
        )

    def finish(
        self, gives: Sequence[int], consumes: Sequence[int], writes_all: bool = False
    ) -> tuple[OpProgram, tuple[tuple[int, ShardingSpec | None], ...]]:
        """The program, and its inputs: the position of each in the call, with the layout to move it to (None: as it
        is)."""
        self.steps = drop_unused(self.steps, gives)
        used = {register for step in self.steps for register in registers_read(step)} | set(gives) | set(consumes)
        takes: list[int] = [register for register in range(self._inputs) if register in used]
        sources: list[tuple[int, ShardingSpec | None]] = [(register, None) for register in takes]
        for (register, spec), moved in self.hoisted.items():
            if moved in used:
                takes.append(moved)
                sources.append((register, spec))
        positions = {register: position for position, register in enumerate(takes)}
        consumed = tuple([positions[register] for register in consumes])
        program = OpProgram(tuple(self.steps), tuple(takes), tuple(gives), consumed, writes_all)
        return program, tuple(sources)


def view_call(step: ViewStep, source: TensorMeta) -> tuple[OpCall, int]:
    """A view step as a call, and the position of its result among the results of the call."""
    return OpCall(step.op, (Input(0), *step.args), step.kwargs, (source,), step.results), step.pick or 0
