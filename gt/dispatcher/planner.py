"""Plans of ops and moves: the workers, the layouts of inputs and results, and the program. Pure functions.

`plan_op` chooses the mesh and the target layouts, and `gt.sharding.lowering`, called by the ProgramBuilder, finds the
cheapest way to compute on shards there.
"""

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
    """How to run a call on inputs of given layouts.

    `takes` are the inputs of the command: a position among the call's inputs, and the layout to move it to (None: as
    it is). `results` are the metas and layouts of the new tensors, then of the new versions. `program` is None if the
    op runs unchanged on whole tensors. `collectives` are those of the program. `gathered` names the op without a rule
    because of which inputs are gathered, if any. A `linear` plan is valid only for scalars with which the op is linear.
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
    aliased_inputs: Mapping[int, int] | None = None,
    policy: Policy | None = None,
    copies: Sequence[tuple[ShardingSpec, ...]] = (),
    reduces_first: bool = False,
) -> Plan:
    """The cheapest way to run an op. It runs on the mesh of the inputs it writes, else on that of its scope, else on
    the one that holds most bytes of its inputs, and on `fallback` if it has no inputs.

    `aliased_inputs` maps each input that aliases a written one to that one's position; on whole tensors both share
    memory. `copies` are, per input, other layouts in which it exists too; a written input is written in its own layout,
    so its copies do not count. With `reduces_first` partial inputs are reduced before the op, because it is not linear
    with the scalars of this call.
    """
    usable = [() if i in signature.writes else layouts for i, layouts in enumerate(copies or [()] * len(specs))]
    inputs = [Register(meta, spec, layouts) for meta, spec, layouts in zip(metas, specs, usable, strict=True)]
    targets: list[Target] = [None] * len(signature.outputs)
    if signature.writes:
        mesh = specs[signature.writes[0]].mesh
        assert all(specs[position].mesh is mesh for position in signature.writes), "written inputs are on one mesh"
        if policy is not None and policy.mesh is mesh:
            targets = [policy.target(meta.shape) for meta in signature.outputs]
    elif signature.layout is not None:
        layout = spec_of(signature.layout)
        mesh, targets = layout.mesh, [layout for _ in signature.outputs]
    elif policy is not None:
        mesh = policy.mesh
        targets = [policy.target(meta.shape) if inputs else policy.layout(meta.shape) for meta in signature.outputs]
    else:
        mesh = mesh_with_most_bytes(inputs) or fallback
    builder = ProgramBuilder(
        mesh, inputs, signature.writes, reduces_first=reduces_first or not _is_linear_with_constants(signature)
    )
    builder, outputs, gathered = _build(builder, signature, inputs, aliased_inputs or {}, targets)
    laid_out = [_with_target(builder, register, target) for register, target in zip(outputs, targets, strict=False)]
    is_sharded = any(spec.mesh.size > 1 and any(spec.dims) for _, spec, _ in inputs)
    overwrites = bool(signature.overwrites) and not aliased_inputs
    gives = (*laid_out, *outputs[len(targets) :])
    return _finish(signature, builder, gives, gathered if is_sharded else "", overwrites)


def _with_target(builder: ProgramBuilder, register: int, target: Target) -> int:
    spec = builder.spec(register)
    return builder.move(
        register, target if isinstance(target, ShardingSpec) else satisfy(target, spec) if target else spec
    )


def mesh_with_most_bytes(inputs: Sequence[Register]) -> DeviceMesh | None:
    """The mesh with the most bytes of the inputs, so that the fewest move; of equals the larger mesh."""
    nbytes: dict[DeviceMesh, int] = {}
    for meta, spec, _ in inputs:
        nbytes[spec.mesh] = nbytes.get(spec.mesh, 0) + meta.nbytes
    return max(nbytes, key=lambda mesh: (nbytes[mesh], mesh.size, [-worker for worker in mesh.workers]), default=None)


def plan_move(meta: TensorMeta, source: ShardingSpec, target: ShardingSpec) -> Plan:
    """Move a tensor to another layout."""
    workers = tuple(dict.fromkeys((*source.mesh.workers, *target.mesh.workers)))
    program = Program((Move(0, 1, meta, source.record(), target.record()),), (0,), (1,))
    return Plan(workers, ((0, None),), ((meta, target),), program, collectives_of(program, "redistribute"))


def collectives_of(program: Program, op: str) -> tuple[Collective, ...]:
    """The communication steps of a program."""
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
_Built = tuple[ProgramBuilder, tuple[int, ...], str]
"""A builder, the registers of its outputs, and the op without a rule (the op itself or a view of an input) because of
which whole tensors are used, if any."""


def _is_linear_with_constants(signature: Signature) -> bool:
    scalars = [complex(arg.real, arg.imag) for arg in signature.args if isinstance(arg, Complex)]
    return is_linear_with(signature.functional or signature.op, scalars)


def _build(
    builder: ProgramBuilder,
    signature: Signature,
    inputs: Sequence[Register],
    aliased_inputs: Mapping[int, int],
    targets: Sequence[Target],
) -> _Built:
    missing, mesh = "", builder.mesh
    layouts = [register.spec for register in inputs] + [target for target in targets if target is not None]
    if any(isinstance(layout, Constraint) or not layout.is_whole for layout in layouts):
        try:
            return builder, _run_on_shards(builder, signature, bool(aliased_inputs), targets), ""
        except NoRule as lack:
            missing = str(lack)
        except Exception as error:  # an error in a rule costs the user this op only
            return _build_failing(signature, inputs, mesh, error)
    builder = ProgramBuilder(mesh, inputs, signature.writes)
    sources = [aliased_inputs.get(position, position) for position in range(len(inputs))]
    return builder, builder.run_whole(signature, sources), missing


def _build_failing(signature: Signature, inputs: Sequence[Register], mesh: DeviceMesh, error: Exception) -> _Built:
    """A program that fails with an error of a sharding rule."""
    builder = ProgramBuilder(mesh, inputs, signature.writes)
    layouts = ", ".join([f"{meta} as [{spec}]" for meta, spec, _ in inputs])
    text = "".join(traceback.format_exception(error)).rstrip()
    reason = f"GT has a mistake in its sharding rule of {signature.op} for {layouts}; please report it:\n{text}"
    return builder, builder.refuse(signature, reason[:_REASON_LENGTH]), ""


def _run_on_shards(
    builder: ProgramBuilder, signature: Signature, is_aliased: bool, targets: Sequence[Target]
) -> tuple[int, ...]:
    """Run an op by its rule, reading and writing through views. Raises NoRule if that is not possible. `is_aliased`:
    some input aliases a written one."""
    if signature.writes:
        return _write_shards(builder, signature, is_aliased)
    return _read_shards(builder, signature, targets)


def _read_shards(builder: ProgramBuilder, signature: Signature, targets: Sequence[Target]) -> tuple[int, ...]:
    used = [builder.view(position, path) for position, path in enumerate(signature.paths)]
    metas = tuple(builder.registers[register].meta for register in used)
    call = OpCall(signature.op, signature.args, signature.kwargs, metas, signature.outputs, signature.positions)
    return builder.apply(call, used, targets, random=signature.random, floating=signature.floating)


def _write_shards(builder: ProgramBuilder, signature: Signature, is_aliased: bool) -> tuple[int, ...]:
    if not signature.functional or (is_aliased and any(signature.paths)):
        raise NoRule(signature.op)
    bases: dict[int, int] = {}
    views: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
    for position in signature.writes:
        bases[position] = _reduced(builder, position)
        found = builder.view_in_place(bases[position], signature.paths[position])
        if found is None:
            raise NoRule(f"{signature.op} through {signature.paths[position][-1].op}")
        views[position] = found
    used = [
        views[position][0] if position in views else builder.view(position, path)
        for position, path in enumerate(signature.paths)
    ]
    only_written = frozenset([value.index for value in inputs_in((), signature.kwargs)]) & views.keys()
    order = [position for position in range(len(used)) if position not in only_written]
    call = _functional_call(builder, signature, used, order, only_written)
    targets = [used[position] for position in signature.writes]
    rest = [position for position in range(len(used)) if position in only_written]
    written = InPlaceWrite(
        (-1,) * len(signature.outputs) + tuple(targets),
        _renumbered(signature, [*order, *rest]),
        tuple(used[position] for position in rest),
    )
    registers = [used[position] for position in order]
    outputs = builder.write(call, registers, written, random=signature.random, floating=signature.floating)
    for position, (view, steps) in views.items():
        if steps:
            builder.write_back(bases[position], view, steps)
    return (*outputs[: len(signature.outputs)], *[bases[position] for position in signature.writes])


def _reduced(builder: ProgramBuilder, position: int) -> int:
    """A partial tensor is reduced before it is written."""
    spec = builder.spec(position)
    return builder.move(position, spec.replace(partial=())) if spec.partial else position


def _functional_call(
    builder: ProgramBuilder,
    signature: Signature,
    used: Sequence[int],
    order: Sequence[int],
    only_written: frozenset[int],
) -> OpCall:
    args, kwargs = functional_args(signature.args, signature.kwargs, only_written)
    new_positions = {position: new for new, position in enumerate(order)}

    def renumber(value: Input) -> Arg:
        return Input(new_positions[value.index])

    written = [builder.registers[used[position]].meta.dense() for position in signature.writes]
    return OpCall(
        signature.functional,
        tuple(with_inputs(arg, renumber) for arg in args),
        {name: with_inputs(arg, renumber) for name, arg in kwargs.items()},
        tuple(builder.registers[used[position]].meta for position in order),
        (*signature.outputs, *written),
    )


def _renumbered(signature: Signature, order: Sequence[int]) -> Signature:
    """The op as it was called, with its inputs in another order and without views."""
    new_positions = {position: new for new, position in enumerate(order)}

    def renumber(value: Input) -> Arg:
        return Input(new_positions[value.index])

    return Signature(
        signature.op,
        tuple(with_inputs(arg, renumber) for arg in signature.args),
        {name: with_inputs(arg, renumber) for name, arg in signature.kwargs.items()},
        ((),) * len(order),
        tuple(new_positions[position] for position in signature.writes),
        (),
        signature.positions,
        signature.random,
        signature.floating,
    )


def _finish(
    signature: Signature, builder: ProgramBuilder, gives: tuple[int, ...], gathered: str, overwrites: bool
) -> Plan:
    program, takes = builder.finish(gives, signature.writes, overwrites)
    linear = builder.assumes_linearity
    results = tuple((builder.registers[register].meta, builder.spec(register)) for register in gives)
    workers = builder.mesh.workers
    if len(program.steps) == 1 and isinstance(program.steps[0], Whole):
        by_register = dict(zip(program.takes, takes, strict=True))
        as_called = tuple(by_register[register] for register in program.steps[0].inputs)
        return Plan(workers, as_called, results, None, (), gathered)
    return Plan(workers, takes, results, program, collectives_of(program, signature.op), gathered, linear)
