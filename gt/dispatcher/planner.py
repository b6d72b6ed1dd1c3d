"""How an op runs: which layouts its inputs need, what each worker does, and how its results lie. Pure functions."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.core.messages import Collective
from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.signatures import Arg, Complex, Input, Move, Program, Signature, Whole
from gt.sharding.constraints import Constraint, Target, satisfy
from gt.sharding.lowering import NoRule
from gt.sharding.op_calls import OpCall, inputs_in, with_inputs
from gt.sharding.program_builder import InPlaceWrite, ProgramBuilder, Register, functional_args
from gt.sharding.reshard import plan_reshard
from gt.sharding.rules import is_linear_with
from gt.sharding.spec import DeviceMesh, ShardingSpec, spec_of
from gt.signals.policy import Policy


class Plan(NamedTuple):
    """What to tell the workers for a call with inputs of given layouts.

    `takes` names the command's inputs: a place of the call, as it lies there (None) or in another layout. `results` are
    the layouts of the new tensors and then of the new versions. `program` is None where the op runs as it is.
    `collectives` are those of the program itself. `gathered`: the op that has no rule, because of which whole
    tensors are used. A `linear` plan is right for calls whose numbers are tame.
    """

    workers: tuple[int, ...]
    takes: tuple[tuple[int, ShardingSpec | None], ...]
    results: tuple[tuple[TensorMeta, ShardingSpec], ...]
    program: Program | None
    collectives: tuple[Collective, ...] = ()
    gathered: str = ""
    linear: bool = False


def plan_op(
    signature: Signature,
    metas: Sequence[TensorMeta],
    specs: Sequence[ShardingSpec],
    fallback: DeviceMesh,
    again: Mapping[int, int] | None = None,
    policy: Policy | None = None,
    copies: Sequence[tuple[ShardingSpec, ...]] = (),
    reduces_first: bool = False,
) -> Plan:
    """The cheapest way to run an op. It runs where its scope says; else on the mesh that holds most of its inputs,
    and on `fallback` where it has none. One that writes runs on the mesh of what it writes to. `aliased_inputs`:
    the places where a tensor that it writes to is an input too, and where it is written; they share its memory
    where the op runs whole, as it may write to all. `copies`: per input, other layouts in which it is there too;
    those of what is written do not count, as it is written where it is. `reduces_first`: partial values are reduced
    before the op, as it is not linear with the numbers of this call."""
    also = [() if place in signature.writes else there for place, there in enumerate(copies or [()] * len(specs))]
    inputs = [Register(meta, spec, there) for meta, spec, there in zip(metas, specs, also, strict=True)]
    wishes: list[Target] = [None] * len(signature.outputs)
    if signature.writes:
        mesh = specs[signature.writes[0]].mesh
        assert all(specs[place].mesh is mesh for place in signature.writes), "all that an op writes to is on one mesh"
        if policy is not None and policy.mesh is mesh:
            wishes = [policy.target(meta.shape) for meta in signature.outputs]
    elif signature.layout is not None:
        layout = spec_of(signature.layout)
        mesh, wishes = layout.mesh, [layout for _ in signature.outputs]
    elif policy is not None:
        mesh = policy.mesh
        wishes = [policy.target(meta.shape) if inputs else policy.layout(meta.shape) for meta in signature.outputs]
    else:
        mesh = meeting_place(inputs) or fallback
    draft = ProgramBuilder(
        mesh, inputs, signature.writes, reduces_first=reduces_first or not _has_tame_constants(signature)
    )
    draft, made, gathered = _draft(draft, signature, inputs, again or {}, wishes)
    laid_out = [_as_wished(draft, register, wish) for register, wish in zip(made, wishes, strict=False)]
    is_cut = any(spec.mesh.size > 1 and any(spec.dims) for _, spec, _ in inputs)
    return _finish(signature, draft, (*laid_out, *made[len(wishes) :]), gathered if is_cut else "")


def _as_wished(draft: ProgramBuilder, register: int, wish: Target) -> int:
    spec = draft.spec(register)
    return draft.move(register, wish if isinstance(wish, ShardingSpec) else satisfy(wish, spec) if wish else spec)


def meeting_place(inputs: Sequence[Register]) -> DeviceMesh | None:
    """The mesh with the most bytes of the inputs, so that the fewest move; of equals the larger mesh."""
    held: dict[DeviceMesh, int] = {}
    for meta, spec, _ in inputs:
        held[spec.mesh] = held.get(spec.mesh, 0) + meta.nbytes
    return max(held, key=lambda mesh: (held[mesh], mesh.size, [-worker for worker in mesh.workers]), default=None)


def plan_move(meta: TensorMeta, source: ShardingSpec, target: ShardingSpec) -> Plan:
    """Lay a tensor out anew."""
    workers = tuple(dict.fromkeys((*source.mesh.workers, *target.mesh.workers)))
    program = Program((Move(0, 1, meta, source.record(), target.record()),), (0,), (1,))
    return Plan(workers, ((0, None),), ((meta, target),), program, collectives_of(program, "redistribute"))


def collectives_of(program: Program, op: str) -> tuple[Collective, ...]:
    """The communication of a program, step by step."""
    found = []
    for step in program.steps:
        if isinstance(step, Move):
            itemsize = ITEM_BYTES[step.meta.dtype]
            plan = plan_reshard(step.meta.shape, itemsize, spec_of(step.source), spec_of(step.target))
            found += [
                Collective(part.kind, part.axes, bytes_, op)
                for part, bytes_ in zip(plan.steps, plan.step_bytes, strict=True)
                if bytes_
            ]
    return tuple(found)


_REASON_LENGTH = 1 << 16
_Drafted = tuple[ProgramBuilder, tuple[int, ...], str]
"""A draft, the registers that it gives, and the op (itself or a view of an input) whose lack of a rule made it run on
whole tensors, if any."""


def _has_tame_constants(signature: Signature) -> bool:
    numbers = [complex(arg.real, arg.imag) for arg in signature.args if isinstance(arg, Complex)]
    return is_linear_with(signature.functional or signature.op, numbers)


def _draft(
    draft: ProgramBuilder,
    signature: Signature,
    inputs: Sequence[Register],
    again: Mapping[int, int],
    wishes: Sequence[Target],
) -> _Drafted:
    missing, mesh = "", draft.mesh
    cuts = [register.spec for register in inputs] + [wish for wish in wishes if wish is not None]
    if any(isinstance(cut, Constraint) or not cut.is_whole for cut in cuts):
        try:
            return draft, _run_on_shards(draft, signature, bool(again), wishes), ""
        except NoRule as lack:
            missing = str(lack)
        except Exception as error:  # a mistake in a rule costs the user this op, and nothing else
            return _refused(signature, inputs, mesh, error)
    draft = ProgramBuilder(mesh, inputs, signature.writes)
    return draft, draft.run_whole(signature, [again.get(place, place) for place in range(len(inputs))]), missing


def _refused(signature: Signature, inputs: Sequence[Register], mesh: DeviceMesh, error: Exception) -> _Drafted:
    """An op that fails with an error that was raised while it was planned."""
    draft = ProgramBuilder(mesh, inputs, signature.writes)
    layouts = ", ".join([f"{meta} as [{spec}]" for meta, spec, _ in inputs])
    told = "".join(traceback.format_exception(error)).rstrip()
    reason = f"GT has a mistake in its sharding rule of {signature.op} for {layouts}; please report it:\n{told}"
    return draft, draft.refuse(signature, reason[:_REASON_LENGTH]), ""


def _run_on_shards(
    draft: ProgramBuilder, signature: Signature, alike: bool, wishes: Sequence[Target]
) -> tuple[int, ...]:
    """The op by its rule, reading and writing through views. Raises NoRule where that is not possible. `alike`: what it
    writes to is another of its inputs too."""
    return _write_shards(draft, signature, alike) if signature.writes else _read_shards(draft, signature, wishes)


def _read_shards(draft: ProgramBuilder, signature: Signature, wishes: Sequence[Target]) -> tuple[int, ...]:
    used = [draft.view(place, path) for place, path in enumerate(signature.paths)]
    metas = tuple([draft.registers[register].meta for register in used])
    call = OpCall(signature.op, signature.args, signature.kwargs, metas, signature.outputs, signature.places)
    return draft.apply(call, used, wishes, random=signature.random, floating=signature.floating)


def _write_shards(draft: ProgramBuilder, signature: Signature, alike: bool) -> tuple[int, ...]:
    if not signature.functional or (alike and any(signature.paths)):
        raise NoRule(signature.op)
    bases: dict[int, int] = {}
    views: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
    for place in signature.writes:
        bases[place] = _settled(draft, place)
        found = draft.view_in_place(bases[place], signature.paths[place])
        if found is None:
            raise NoRule(f"{signature.op} through {signature.paths[place][-1].op}")
        views[place] = found
    used = [
        views[place][0] if place in views else draft.view(place, path) for place, path in enumerate(signature.paths)
    ]
    only_written = frozenset([value.index for value in inputs_in((), signature.kwargs)]) & views.keys()
    order = [place for place in range(len(used)) if place not in only_written]
    call = _functional_call(draft, signature, used, order, only_written)
    targets = [used[place] for place in signature.writes]
    also = [place for place in range(len(used)) if place in only_written]
    written = InPlaceWrite(
        (-1,) * len(signature.outputs) + tuple(targets),
        _renumbered(signature, [*order, *also]),
        tuple([used[place] for place in also]),
    )
    registers = [used[place] for place in order]
    outputs = draft.write(call, registers, written, random=signature.random, floating=signature.floating)
    for place, (view, steps) in views.items():
        if steps:
            draft.write_back(bases[place], view, steps)
    return (*outputs[: len(signature.outputs)], *[bases[place] for place in signature.writes])


def _settled(draft: ProgramBuilder, place: int) -> int:
    """A tensor that is to be written: not partial."""
    spec = draft.spec(place)
    return draft.move(place, spec.replace(partial=())) if spec.partial else place


def _functional_call(
    draft: ProgramBuilder, signature: Signature, used: Sequence[int], order: Sequence[int], only_written: frozenset[int]
) -> OpCall:
    args, kwargs = functional_args(signature.args, signature.kwargs, only_written)
    places = {place: new for new, place in enumerate(order)}

    def renumber(value: Input) -> Arg:
        return Input(places[value.index])

    written = [draft.registers[used[place]].meta.dense() for place in signature.writes]
    return OpCall(
        signature.functional,
        tuple([with_inputs(arg, renumber) for arg in args]),
        {name: with_inputs(arg, renumber) for name, arg in kwargs.items()},
        tuple([draft.registers[used[place]].meta for place in order]),
        (*signature.outputs, *written),
    )


def _renumbered(signature: Signature, order: Sequence[int]) -> Signature:
    """The op as it was called, for tensors in another order and without views."""
    places = {place: new for new, place in enumerate(order)}

    def renumber(value: Input) -> Arg:
        return Input(places[value.index])

    return Signature(
        signature.op,
        tuple([with_inputs(arg, renumber) for arg in signature.args]),
        {name: with_inputs(arg, renumber) for name, arg in signature.kwargs.items()},
        ((),) * len(order),
        tuple([places[place] for place in signature.writes]),
        (),
        signature.places,
        signature.random,
        signature.floating,
    )


def _finish(signature: Signature, draft: ProgramBuilder, gives: tuple[int, ...], gathered: str) -> Plan:
    program, takes = draft.finish(gives, signature.writes)
    linear = draft.assumes_linearity
    results = tuple([(draft.registers[register].meta, draft.spec(register)) for register in gives])
    workers = draft.mesh.workers
    if len(program.steps) == 1 and isinstance(program.steps[0], Whole):
        by_register = dict(zip(program.takes, takes, strict=True))
        as_called = tuple([by_register[register] for register in program.steps[0].inputs])
        return Plan(workers, as_called, results, None, (), gathered)
    return Plan(workers, takes, results, program, collectives_of(program, signature.op), gathered, linear)
