"""An op on laid-out tensors as a program for workers: choose layouts, move what is elsewhere, compute on shards.

infer_output_sharding  which layouts the op runs with
reshard_inputs         the moves that bring its operands there
create_sharded_output  the registers of its results
get_shard_args         what one worker does for its part (called on the worker)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.signatures import Arg, Compute, Input, Move, Program, Refuse, Settle, Signature, Step, ViewStep, Whole
from gt.sharding.constraints import Constraint
from gt.sharding.cost import reshard_bytes
from gt.sharding.op_calls import Expansion, LocalContext, LocalProgram, OpCall, has_numbers, inputs_in, with_inputs
from gt.sharding.propagation import Choice, Operand, Result, Strategy, propagate_sharding
from gt.sharding.rules import entry_of, lower, rule_of
from gt.sharding.spec import DeviceMesh, ShardingSpec, compute_local_shape, whole

Target: TypeAlias = ShardingSpec | Constraint | None


class NoRule(Exception):
    """The op cannot run on shards: it has no rule."""


class Register(NamedTuple):
    """A tensor of a draft and how it lies. `also`: other layouts in which it is there too, so that nothing moves."""

    meta: TensorMeta
    spec: ShardingSpec
    also: tuple[ShardingSpec, ...] = ()


class Written(NamedTuple):
    """How an op overwrites its arguments. `into`: per output of the call, the register that it is written into, or -1.
    `in_place`: the op as it was called, which takes the call's inputs and then the registers `also`."""

    into: tuple[int, ...]
    in_place: Signature
    also: tuple[int, ...] = ()


def infer_output_sharding(
    call: OpCall,
    specs: Sequence[ShardingSpec],
    mesh: DeviceMesh,
    wishes: Sequence[Target] = (),
    also: Sequence[tuple[ShardingSpec, ...]] = (),
    reduces_first: bool = False,
) -> Choice:
    """The layouts that an op runs with: those that move the fewest bytes. Raises NoRule where it has no rule. `also`:
    per input, other layouts in which it is there too. `reduces_first`: no partial values pass or are made."""
    rule = rule_of(call)
    if rule is None:
        raise NoRule(call.op)
    rule = rule.reducing_first() if reduces_first else rule
    assert (len(rule.operands), len(rule.results)) == (len(call.inputs), len(call.outputs)), (
        f"{call} has the rule {rule}"
    )
    copies = also or [()] * len(specs)
    needed = specs if rule.reads else [spec.replace(partial=()) for spec in specs]
    operands = [
        Operand(meta.shape, ITEM_BYTES[meta.dtype], spec, there)
        for meta, spec, there in zip(call.inputs, needed, copies, strict=True)
    ]
    wanted = list(wishes) or [None] * len(call.outputs)
    results = [
        Result(meta.shape, ITEM_BYTES[meta.dtype], wish) for meta, wish in zip(call.outputs, wanted, strict=True)
    ]
    choice = propagate_sharding(rule, operands, results, mesh)
    if rule.reads:
        return choice
    used = zip(specs, needed, choice.strategy.operands, strict=True)
    as_they_lie = tuple([spec if taken is wanted else taken for spec, wanted, taken in used])
    return choice._replace(strategy=choice.strategy._replace(operands=as_they_lie))


def get_shard_args(shard: LocalContext) -> LocalProgram:
    """The ops that one worker runs, with the arguments that its part needs."""
    return lower(shard)


def create_sharded_output(meta: TensorMeta, spec: ShardingSpec, worker: int) -> TensorMeta:
    """What a worker holds of a tensor."""
    return meta.part(compute_local_shape(spec, meta.shape, worker))


class ProgramBuilder:
    """A program being written, on one mesh. `hoisted` are moves of inputs that are best done before the program, as the
    moved tensor may be there already or be used again: (input, layout) to register. `fixed` inputs are written to, so
    they are not hoisted. `reduces_first`: ops neither take nor give partial values."""

    def __init__(
        self,
        mesh: DeviceMesh,
        inputs: Sequence[Register],
        fixed: Collection[int] = (),
        *,
        reduces_first: bool = False,
    ) -> None:
        self.mesh = mesh
        self.registers = list(inputs)
        self.steps: list[Step] = []
        self.hoisted: dict[tuple[int, ShardingSpec], int] = {}
        self.bytes = 0
        self.results: tuple[int, ...] = ()
        self._origins: dict[int, tuple[OpCall, int, int]] = {}  # of views: the call, its operand, which result
        self._inputs = len(inputs)
        self._fixed = frozenset(fixed)
        self._reduces_first = reduces_first

    def fork(self) -> ProgramBuilder:
        """A copy to try something on."""
        other = ProgramBuilder(self.mesh, self.registers, self._fixed, reduces_first=self._reduces_first)
        other.steps, other.hoisted, other.bytes = list(self.steps), dict(self.hoisted), self.bytes
        other._origins, other._inputs = dict(self._origins), self._inputs
        return other

    def adopt(self, other: ProgramBuilder) -> None:
        self.registers, self.steps, self.hoisted = other.registers, other.steps, other.hoisted
        self.bytes, self._origins = other.bytes, other._origins

    def spec(self, register: int) -> ShardingSpec:
        return self.registers[register].spec

    def move(self, register: int, target: ShardingSpec) -> int:
        """A register with the same tensor, laid out as said."""
        meta, source, also = self.registers[register]
        if source is target:
            return register
        if register in self._origins:
            pulled = self._move_base(register, target)
            if pulled is not None:
                return pulled
            meta = meta.dense()
        hoistable = register < self._inputs and register not in self._fixed
        if hoistable and (register, target) in self.hoisted:
            return self.hoisted[register, target]
        if target not in also:
            self.bytes += reshard_bytes(meta.shape, ITEM_BYTES[meta.dtype], source, target)
        moved = self._new(meta, target)
        if hoistable:
            self.hoisted[register, target] = moved
        else:
            self.steps.append(Move(register, moved, meta, source.record(), target.record()))
        return moved

    def _move_base(self, register: int, target: ShardingSpec) -> int | None:
        """Move what a register is a view of, rather than the view, where that costs no more: the moved tensor may be
        there already or be used again."""
        call, base, pick = self._origins[register]
        wishes = [target if place == pick else None for place in range(len(call.outputs))]
        choice = infer_output_sharding(call, [self.spec(base)], self.mesh, wishes, [self.registers[base].also])
        meta, source, _ = self.registers[register]
        direct = reshard_bytes(meta.shape, ITEM_BYTES[meta.dtype], source, target)
        if choice.strategy.results[pick] is not target or choice.bytes > direct:
            return None
        return self._compute(call, (base,), choice.strategy, is_view=True)[pick]

    def _new(self, meta: TensorMeta, spec: ShardingSpec) -> int:
        self.registers.append(Register(meta, spec))
        return len(self.registers) - 1

    # Ops

    def reshard_inputs(self, registers: Sequence[int], strategy: Strategy) -> tuple[int, ...]:
        return tuple([self.move(register, spec) for register, spec in zip(registers, strategy.operands, strict=True)])

    def apply(
        self,
        call: OpCall,
        registers: Sequence[int],
        wishes: Sequence[Target] = (),
        *,
        random: bool = False,
        floating: str = "float32",
    ) -> tuple[int, ...]:
        """Run an op by the cheapest strategy of its rule, or as several ops where that moves less."""
        choice = self._choose(call, registers, wishes)
        if isinstance(choice, ProgramBuilder):
            self.adopt(choice)
            return choice.results
        return self._compute(call, registers, choice.strategy, random=random, floating=floating)

    def _choose(self, call: OpCall, registers: Sequence[int], wishes: Sequence[Target]) -> Choice | ProgramBuilder:
        """The best strategy of an op's rule, or a draft in which it was run as several ops (with its `results`)."""
        specs = [self.spec(register) for register in registers]
        entry = entry_of(call.op)
        expansion = entry.expand(call, specs) if entry is not None and entry.expand is not None else None
        try:
            also = [self.registers[register].also for register in registers]
            choice = infer_output_sharding(call, specs, self.mesh, wishes, also, self._reduces_first)
        except NoRule:
            if expansion is None:
                raise
            choice = None
        if expansion is None or (choice is not None and not choice.bytes):
            assert choice is not None
            return choice
        trial = self.fork()
        trial.results = trial.expand(expansion, registers, call.outputs)
        return trial if choice is None or trial.bytes - self.bytes < choice.bytes else choice

    def _compute(
        self,
        call: OpCall,
        registers: Sequence[int],
        strategy: Strategy,
        *,
        random: bool = False,
        floating: str = "float32",
        written: Written | None = None,
        is_view: bool = False,
        casts: bool = False,
    ) -> tuple[int, ...]:
        inputs = self.reshard_inputs(registers, strategy)
        into = written.into if written is not None else ()
        outputs = tuple(
            [
                into[place] if into and into[place] >= 0 else self._new(meta, spec)
                for place, (meta, spec) in enumerate(zip(call.outputs, strategy.results, strict=True))
            ]
        )
        also = written.also if written is not None else ()
        self.steps.append(
            Compute(
                call.op,
                call.args,
                dict(call.kwargs),
                (*inputs, *also),
                outputs,
                call.inputs,
                call.outputs,
                tuple([spec.record() for spec in strategy.operands]),
                tuple([spec.record() for spec in strategy.results]),
                into,
                written.in_place if written is not None else None,
                random,
                floating,
                is_view,
                casts,
                call.places,
            )
        )
        return outputs

    def expand(
        self, expansion: Expansion, registers: Sequence[int], outputs: Sequence[TensorMeta]
    ) -> tuple[int, ...]:  # fmt: skip
        """Run an op as the several ops of an expansion. What it gives has the memory format of its outputs."""
        own = list(registers)
        told = dict(zip(expansion.results, outputs, strict=True))
        for piece in expansion.pieces:
            used = list(dict.fromkeys(value.index for value in inputs_in(piece.args, piece.kwargs)))
            places = {register: place for place, register in enumerate(used)}
            args = tuple([with_inputs(arg, lambda value: Input(places[value.index])) for arg in piece.args])
            kwargs = {
                name: with_inputs(arg, lambda value: Input(places[value.index])) for name, arg in piece.kwargs.items()
            }
            metas = tuple([self.registers[own[register]].meta for register in used])
            made = tuple([told.get(place, meta) for place, meta in enumerate(piece.outputs, len(own))])
            call = OpCall(piece.op, args, kwargs, metas, made, piece.places)
            own.extend(self.apply(call, [own[register] for register in used]))
        return tuple([own[place] for place in expansion.results])

    def view(self, register: int, steps: Sequence[ViewStep]) -> int:
        """The register of a view of a tensor, moved where a view op cannot carry the layout."""
        for step in steps:
            call, pick = view_call(step, self.registers[register].meta)
            choice = infer_output_sharding(call, [self.spec(register)], self.mesh)
            made = self._compute(call, (register,), choice.strategy, is_view=True)[pick]
            self._origins[made] = (call, register, pick)
            also = self._also_as_view(call, pick, self.registers[register].also)
            self.registers[made] = self.registers[made]._replace(also=also)
            register = made
        return register

    def _also_as_view(self, call: OpCall, pick: int, also: Sequence[ShardingSpec]) -> tuple[ShardingSpec, ...]:
        """The layouts in which a view is there because what it is a view of is there in others."""
        choices = [infer_output_sharding(call, [spec], self.mesh).strategy for spec in also if spec.mesh is self.mesh]
        return tuple([choice.results[pick] for choice in choices if choice.operands[0] in also])

    def view_in_place(self, register: int, steps: Sequence[ViewStep]) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """The register of a view that shares the shards of its base, and the steps that make it; None where some step
        would have to move or copy something."""
        made = []
        for step in steps:
            call, pick = view_call(step, self.registers[register].meta)
            before = self.spec(register)
            try:
                choice = infer_output_sharding(call, [before], self.mesh)
            except NoRule:
                return None
            results = choice.strategy.results
            if choice.strategy.operands[0] is not before or any(spec.partial for spec in results):
                return None
            made.append((len(self.steps), pick))
            register = self._compute(call, (register,), choice.strategy, is_view=True)[pick]
        return register, tuple(made)

    def write(
        self,
        call: OpCall,
        registers: Sequence[int],
        written: Written,
        *,
        random: bool = False,
        floating: str = "float32",
    ) -> tuple[int, ...]:
        """Run an op that overwrites registers. Gives the registers of all its outputs."""
        wishes = [None if target < 0 else self.spec(target) for target in written.into]
        specs = [self.spec(register) for register in registers]
        choice = self._choose(call, registers, wishes)
        if isinstance(choice, ProgramBuilder):
            self.adopt(choice)
            return self._copied(written, choice.results)
        given, needed = choice.strategy.results, choice.strategy.operands
        kept = all(wish is None or wish is spec for wish, spec in zip(wishes, given, strict=True))
        still = all(spec is specs[p] for p, spec in enumerate(needed) if registers[p] in written.into)
        if kept and still:
            return self._compute(call, registers, choice.strategy, random=random, floating=floating, written=written)
        results = self._compute(call, registers, choice.strategy, random=random, floating=floating, casts=True)
        return self._copied(written, results)

    def _copied(self, written: Written, results: Sequence[int]) -> tuple[int, ...]:
        """Results that were computed apart, copied into what they overwrite."""
        return tuple(
            [
                result if target < 0 else self._copy_into(target, result)
                for target, result in zip(written.into, results, strict=True)
            ]
        )

    def _copy_into(self, target: int, result: int) -> int:
        meta, spec, _ = self.registers[target]
        moved = self.move(result, spec)
        call = OpCall("aten.copy.default", (Input(0), Input(1)), {}, (meta, self.registers[moved].meta), (meta,))
        signature = Signature("aten.copy_.default", call.args, {}, ((), ()), (0,), (), ())
        strategy = Strategy((spec, self.spec(moved)), (spec,), {})
        return self._compute(call, (target, moved), strategy, written=Written((target,), signature))[0]

    def settle(self, base: int, view: int, steps: tuple[tuple[int, int], ...]) -> None:
        self.steps.append(Settle(base, view, steps))

    def run_whole(self, signature: Signature, registers: Sequence[int]) -> tuple[int, ...]:
        """Run an op as it is, on whole operands. What it writes to goes back to the layout it had. A register that it
        takes twice is one tensor for it, so that it may write to several views of that."""
        moved = {
            register: self.move(register, whole(self.mesh, len(self.registers[register].meta.shape)))
            for register in dict.fromkeys(registers)
        }
        needed = [moved[register] for register in registers]
        outputs = [self._new(meta, whole(self.mesh, len(meta.shape))) for meta in signature.outputs]
        self.steps.append(Whole(signature, tuple(needed), tuple(outputs)))
        for place in signature.writes:
            before = self.spec(registers[place])
            keeps = before if not before.partial and before.mesh is self.mesh else self.spec(needed[place])
            outputs.append(self.move(needed[place], keeps))
        return tuple(outputs)

    def refuse(self, signature: Signature, reason: str) -> tuple[int, ...]:
        """Let an op fail for a reason, on all workers."""
        metas = [*signature.outputs, *[self.registers[place].meta for place in signature.writes]]
        outputs = tuple([self._new(meta, whole(self.mesh, len(meta.shape))) for meta in metas])
        self.steps.append(Refuse(signature.op, reason, outputs))
        return outputs

    # The end

    def _drop_unused(self, gives: Sequence[int]) -> None:
        """Leave out steps whose results nobody reads. Steps that a `Settle` names by number are read by it."""
        if any(isinstance(step, Settle) for step in self.steps):
            return
        used = set(gives)
        kept: list[Step] = []
        for step in reversed(self.steps):
            if _writes(step) or isinstance(step, Settle) or used.intersection(_given_by(step)):
                used.update(_read_by(step))
                kept.append(step)
        self.steps = kept[::-1]

    @property
    def is_linear(self) -> bool:
        """Whether partial values go into, or come out of, an op with numbers that change from call to call."""
        return any(
            any(spec.partial for spec in (*step.operands, *step.results)) and has_numbers(step.args, step.kwargs)
            for step in self.steps
            if isinstance(step, Compute)
        )

    def finish(
        self, gives: Sequence[int], consumes: Sequence[int]
    ) -> tuple[Program, tuple[tuple[int, ShardingSpec | None], ...]]:
        """The program, and what it takes: inputs by their place, as they are (None) or moved to a layout."""
        self._drop_unused(gives)
        used = {register for step in self.steps for register in _read_by(step)} | set(gives) | set(consumes)
        takes: list[int] = [register for register in range(self._inputs) if register in used]
        sources: list[tuple[int, ShardingSpec | None]] = [(register, None) for register in takes]
        for (register, spec), moved in self.hoisted.items():
            if moved in used:
                takes.append(moved)
                sources.append((register, spec))
        places = {register: place for place, register in enumerate(takes)}
        program = Program(tuple(self.steps), tuple(takes), tuple(gives), tuple([places[r] for r in consumes]))
        return program, tuple(sources)


def _writes(step: Step) -> bool:
    """Whether a step does something else than to give registers."""
    if isinstance(step, Whole):
        return bool(step.signature.writes)
    return isinstance(step, Settle) or (isinstance(step, Compute) and any(register >= 0 for register in step.into))


def _given_by(step: Compute | Whole | Move | Refuse) -> tuple[int, ...]:
    return (step.output,) if isinstance(step, Move) else step.outputs


def _read_by(step: Step) -> tuple[int, ...]:
    if isinstance(step, Move):
        return (step.input,)
    if isinstance(step, Settle):
        return (step.base, step.view)
    if isinstance(step, Refuse):
        return ()
    return (*step.inputs, *(register for register in getattr(step, "into", ()) if register >= 0))


def view_call(step: ViewStep, source: TensorMeta) -> tuple[OpCall, int]:
    """A view step as a call, and which of its results is meant."""
    return OpCall(step.op, (Input(0), *step.args), step.kwargs, (source,), step.results), step.pick or 0


def functional_args(
    args: Sequence[Arg], kwargs: Mapping[str, Arg], dropped: frozenset[int]
) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """Arguments without those that are only written to (`out=`)."""
    kept = {name: value for name, value in kwargs.items() if not _is_dropped(value, dropped)}
    return tuple([value for value in args if not _is_dropped(value, dropped)]), kept


def _is_dropped(value: Arg, dropped: frozenset[int]) -> bool:
    named = [found.index for found in inputs_in((value,), {})]
    return bool(named) and dropped.issuperset(named)
