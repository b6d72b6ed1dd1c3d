"""Plans of ops and moves: the workers, the layouts of inputs and results, and the program. Pure functions.

`plan_op` chooses the mesh and the target layouts, and `gt.sharding.op_programs` builds the program there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.core.messages import Collective
from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.signatures import Compute, Move, OpProgram, Signature, Whole
from gt.sharding.considered_strategies import NotedCall
from gt.sharding.constraints import Target
from gt.sharding.op_programs import build_op, mesh_with_most_bytes
from gt.sharding.program_builder import ProgramBuilder, Register
from gt.sharding.reshard import ReshardStep, plan_reshard
from gt.sharding.spec import DeviceMesh, ShardingSpec, mesh_of, spec_of, whole
from gt.signals.policy import Policy


class Plan(NamedTuple):
    """How to run a call on inputs of given layouts.

    `sources` are, for each input of the command, a position among the call's inputs, and the layout to move that input
    to (None: as it is). `results` are the metas and layouts of the new tensors, then of the new versions. `program` is
    None if the op runs unchanged on whole tensors. `collectives` are those of the program. `gathered` is the op without
    a rule that forces its inputs to be gathered, or "". A `linear` plan is valid only for scalars with which the op is
    linear. `reduces`: the plan reduces partial inputs.
    """

    workers: tuple[int, ...]
    sources: tuple[tuple[int, ShardingSpec | None], ...]
    results: tuple[tuple[TensorMeta, ShardingSpec], ...]
    program: OpProgram | None
    collectives: tuple[Collective, ...] = ()
    gathered: str = ""
    linear: bool = False
    reduces: bool = False


def plan_op(
    signature: Signature,
    metas: Sequence[TensorMeta],
    specs: Sequence[ShardingSpec],
    fallback: DeviceMesh,
    aliased_inputs: Mapping[int, int] | None = None,
    policy: Policy | None = None,
    copies: Sequence[tuple[ShardingSpec, ...]] = (),
    reduces_first: bool = False,
    noted: list[NotedCall] | None = None,
) -> Plan:
    """The cheapest way to run an op. It runs on the mesh of the inputs it writes, else on that of its scope, else on
    the one that holds most bytes of its inputs, and on `fallback` if it has no inputs.

    `aliased_inputs` maps each input that aliases a written one to that one's position; on whole tensors both share
    memory. `copies` are, per input, other layouts in which it exists too; a written input is written in its own layout,
    so its copies do not count. With `reduces_first` partial inputs are reduced before the op, because it is not linear
    with the scalars of this call. `noted` gets the calls that were laid out by a rule, with their strategies.
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
    elif signature.algorithm is not None and signature.algorithm.mesh is not None:
        mesh = mesh_of(signature.algorithm.mesh)
    elif policy is not None:
        mesh = policy.mesh
        targets = [policy.target(meta.shape) if inputs else policy.layout(meta.shape) for meta in signature.outputs]
    else:
        mesh = mesh_with_most_bytes(inputs) or fallback
        is_whole = all(register.spec is whole(mesh, len(register.meta.shape)) for register in inputs)
        if is_whole and signature.algorithm is None:
            return _plan_whole(signature, mesh)
    built = build_op(signature, mesh, inputs, targets, aliased_inputs or {}, reduces_first=reduces_first, noted=noted)
    is_sharded = any(spec.mesh.size > 1 and any(spec.dims) for _, spec, _ in inputs)
    writes_all = bool(signature.fully_written) and not aliased_inputs
    return _finish(signature, built.builder, built.results, built.gathered if is_sharded else "", writes_all)


def _plan_whole(signature: Signature, mesh: DeviceMesh) -> Plan:
    """The plan of an op that writes nothing, all of whose inputs are whole on the mesh already."""
    sources = tuple([(position, None) for position in range(len(signature.paths))])
    results = tuple([(meta, whole(mesh, len(meta.shape))) for meta in signature.outputs])
    return Plan(mesh.workers, sources, results, None)


def plan_move(meta: TensorMeta, source: ShardingSpec, target: ShardingSpec) -> Plan:
    """Move a tensor to another layout."""
    return plan_moves([TensorMove(meta, source, target)])


class TensorMove(NamedTuple):
    """A move of a tensor between two layouts."""

    meta: TensorMeta
    source: ShardingSpec
    target: ShardingSpec

    @property
    def exchange(self) -> tuple[object, ...]:
        """A key: moves with equal keys can run as one exchange. They have the same collectives, along the same axes of
        the same mesh, and elements of one dtype."""
        kinds = [(step.kind, step.axes, nbytes > 0) for step, nbytes in self.steps()]
        return self.meta.dtype, self.source.mesh, self.target.mesh, self.source.kind, *kinds

    def steps(self) -> list[tuple[ReshardStep, int]]:
        """The steps of the move, and the bytes that all workers together receive in each."""
        plan = plan_reshard(self.meta.shape, ITEM_BYTES[self.meta.dtype], self.source, self.target)
        return list(zip(plan.steps, plan.step_bytes, strict=True))


def plan_moves(moves: Sequence[TensorMove]) -> Plan:
    """Move tensors to other layouts in one exchange; `exchange` is the same for all of them."""
    first = moves[0]
    workers = tuple(dict.fromkeys((*first.source.mesh.workers, *first.target.mesh.workers)))
    count = len(moves)
    steps = [
        Move(number, count + number, meta, source.record(), target.record())
        for number, (meta, source, target) in enumerate(moves)
    ]
    program = OpProgram(tuple(steps), tuple(range(count)), tuple(range(count, 2 * count)))
    sources = tuple((number, None) for number in range(count))
    results = tuple((move.meta, move.target) for move in moves)
    collectives = tuple(
        Collective(same[0][0].kind, same[0][0].axes, sum(nbytes for _, nbytes in same), "redistribute", 0, count)
        for same in zip(*[move.steps() for move in moves], strict=True)
        if same[0][1]
    )
    return Plan(workers, sources, results, program, collectives)


def moves_in(program: OpProgram) -> list[TensorMove]:
    """The moves among the steps of a program."""
    steps = [step for step in program.steps if isinstance(step, Move)]
    return [TensorMove(step.meta, spec_of(step.source), spec_of(step.target)) for step in steps]


def collectives_of(program: OpProgram, op: str) -> tuple[Collective, ...]:
    """The communication steps of a program."""
    parts = [part for move in moves_in(program) for part in move.steps()]
    return tuple([Collective(step.kind, step.axes, nbytes, op) for step, nbytes in parts if nbytes])


def _reduces_inputs(
    builder: ProgramBuilder, program: OpProgram, sources: Sequence[tuple[int, ShardingSpec | None]]
) -> bool:
    """Whether partial inputs, or views of them, are reduced before the op."""
    taken = {register for register, (_, spec) in zip(program.takes, sources, strict=True) if spec is None}
    for step in program.steps:
        if isinstance(step, Compute) and step.is_view and taken.issuperset(step.inputs):
            taken.update(step.outputs)
        elif isinstance(step, Move) and step.input in taken and set(step.source.partial) - set(step.target.partial):
            return True
    return any(spec is not None and builder.spec(at).partial and not spec.partial for at, spec in sources)


def _finish(
    signature: Signature, builder: ProgramBuilder, gives: tuple[int, ...], gathered: str, writes_all: bool
) -> Plan:
    program, sources = builder.finish(gives, signature.writes, writes_all)
    reduces = _reduces_inputs(builder, program, sources)
    linear = builder.assumes_linearity
    results = tuple((builder.registers[register].meta, builder.spec(register)) for register in gives)
    workers = builder.mesh.workers
    if len(program.steps) == 1 and isinstance(program.steps[0], Whole):
        by_register = dict(zip(program.takes, sources, strict=True))
        as_called = tuple(by_register[register] for register in program.steps[0].inputs)
        return Plan(workers, as_called, results, None, (), gathered, reduces=reduces)
    return Plan(workers, sources, results, program, collectives_of(program, signature.op), gathered, linear, reduces)
