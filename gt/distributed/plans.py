"""`gt.distributed.explain`: how a product runs, what it costs, and what the alternatives would cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gt.core.errors import LayoutError
from gt.core.meta import ITEM_BYTES, TensorMeta, contiguous_strides
from gt.core.signatures import Compute, Input, Move, OpProgram
from gt.core.tracebacks import ends_on_users_line
from gt.distributed.operands import OperandMove, ProductRequest, ProductSource, product_shape, request_product
from gt.sharding.host_order import host_share
from gt.sharding.op_calls import OpCall
from gt.sharding.placements import Placements
from gt.sharding.program_builder import ProgramBuilder
from gt.sharding.reshard import bytes_by_pair, plan_reshard
from gt.sharding.rules import entry_of
from gt.sharding.schedule_programs import choose_schedule, problem_of, sum_rounds
from gt.sharding.schedules import Schedule, ScheduleCost, ScheduleProblem, find_schedule, schedule_cost
from gt.sharding.spec import DeviceMesh, ShardingSpec, compute_local_shape, spec_of

OP = "aten.matmul.default"


class PlannedMove(NamedTuple):
    """A step of a move of one tensor: "a", "b" or "out", in a round of the plan (from 1; 0: before the first)."""

    tensor: str
    round: int
    kind: str
    axes: tuple[str, ...]
    bytes: int


class Alternative(NamedTuple):
    """Another way to compute the product: bytes moved, exchanges one after another, and the most bytes that a worker
    holds beside the operands."""

    algorithm: str
    out: ShardingSpec
    cost: ScheduleCost


class ProductPlan(NamedTuple):
    """How a product runs. `flops` are those of all workers together and of the busiest one; `memory` is the most bytes
    that a worker holds beside the operands in their own layouts; `pairs` has the bytes by (sender, receiver);
    `host_bytes` are those that travel between machines.

    >>> gt.init(workers=2, mode="virtual")
    >>> with gt.open_mesh(2, ("x",)):
    ...     plan = gt.distributed.explain(torch.ones(8, 4), torch.ones(4, 2), algo="gather_b")
    >>> plan.bytes, plan.pairs
    (32, {(1, 0): 16, (0, 1): 16})
    """

    algorithm: str
    operands: tuple[ShardingSpec, ...]
    out: ShardingSpec
    rounds: int
    moves: tuple[PlannedMove, ...]
    bytes: int
    pairs: dict[tuple[int, int], int]
    flops: int
    worker_flops: int
    memory: int
    alternatives: tuple[Alternative, ...]
    host_bytes: int = 0

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@ends_on_users_line
def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    out: Placements | None = None,
    mesh: DeviceMesh | None = None,
    *,
    algo: str | None = None,
    panel: int = 0,
) -> ProductPlan:
    """The plan of `gt.distributed.matmul` with the same arguments, without running it: bytes are those that are then
    counted. Printed, it is a table with the alternatives.

    >>> gt.init(workers=2, mode="virtual")
    >>> with gt.open_mesh(2, ("x",)):
    ...     plan = gt.distributed.explain(torch.ones(8, 4), torch.ones(4, 2), algo="gather_b")
    >>> print(str(plan).splitlines()[0])
    [x, -] @ [x, -] -> [x, -] by gather_b, 1 round
    """
    return plan_product(request_product(a, b, out, mesh, algo, panel))


class _BuiltProduct(NamedTuple):
    """The program of a product as the dispatcher builds it.

    - `takes`: the operand, 0 or 1, of each register that the program begins with
    - `bases`: the tensors that the instruction names for the operands
    - `copied_views`: the moves, by operand, that copy views of tensors on other meshes
    - `moved_inputs`: the moves of these before the program: the operand, its layout, and the one after
    """

    schedule: Schedule
    problem: ScheduleProblem
    program: OpProgram
    takes: dict[int, int]
    bases: tuple[TensorMeta, ...]
    copied_views: tuple[tuple[OperandMove, ...], ...]
    moved_inputs: tuple[tuple[int, ShardingSpec, ShardingSpec], ...]


def plan_product(request: ProductRequest) -> ProductPlan:
    """The plan that the dispatcher makes. Raises LayoutError if the algorithm does not fit."""
    built = _build(request)
    alternatives = _alternatives(built.problem)
    algorithm = request.algorithm
    name = algorithm.name if algorithm is not None and algorithm.name else _name(built.schedule, alternatives)
    return _described(name, built, tuple([each for each, _ in alternatives]))


def _build(request: ProductRequest) -> _BuiltProduct:
    a, b, layout, algorithm = request
    mesh = request.mesh([a.register(), b.register()])
    first = a.source(mesh)
    sources = [first, b.source(mesh).without(first)]
    builder = ProgramBuilder(mesh, [source.register for source in sources], algorithm=algorithm)
    used = [builder.view(position, source.steps) for position, source in enumerate(sources)]
    metas = tuple([builder.registers[register].meta for register in used])
    shape = product_shape(a.tensor, b.tensor)
    meta = TensorMeta(shape, contiguous_strides(shape), 0, metas[0].dtype)
    target = layout.spec(meta) if layout is not None else None
    call = OpCall(OP, (Input(0), Input(1)), {}, metas, (meta,))
    entry = entry_of(OP)
    assert entry is not None, "the table has it"
    schedule = choose_schedule(builder, entry.algorithms, call, used, [target])
    problem = problem_of(builder, call, used, [target])
    result = builder.move(sum_rounds(builder, call, used, schedule), problem.result.final_spec(schedule.result))
    program, taken = builder.finish((result,), ())
    takes = {register: position for register, (position, _) in zip(program.takes, taken, strict=True)}
    bases = tuple([source.register.meta for source in sources])
    copied_views = tuple([(*source.base_moves, *source.moves) for source in sources])
    moved_inputs = tuple(_moved_inputs(sources, taken))
    return _BuiltProduct(schedule, problem, program, takes, bases, copied_views, moved_inputs)


def _moved_inputs(
    sources: Sequence[ProductSource], taken: Sequence[tuple[int, ShardingSpec | None]]
) -> Iterator[tuple[int, ShardingSpec, ShardingSpec]]:
    """The moves that the dispatcher makes before the program: none of a tensor of which there is a copy, also one that
    was made for the other operand; and a partial tensor that is reduced stays so, unless it is needed as it is too."""
    is_same = sources[0].ident is not None and sources[0].ident == sources[1].ident
    own = [0, 0 if is_same else 1]
    layouts = {own[position]: each.register.spec for position, each in enumerate(sources)}
    copies = {own[position]: [*each.register.copies] for position, each in enumerate(sources)}
    kept = {own[position] for position, spec in taken if spec is None}
    for position, spec in taken:
        tensor = own[position]
        source = layouts[tensor]
        if spec is None or spec is source or spec in copies[tensor]:
            continue
        yield position, source, spec
        is_reduced = source.partial and not spec.partial and source.mesh is spec.mesh and tensor not in kept
        if is_reduced and spec.is_partition(sources[position].register.meta.shape):
            layouts[tensor] = spec
        else:
            copies[tensor].append(spec)


def _alternatives(problem: ScheduleProblem) -> list[tuple[Alternative, Schedule]]:
    """The best schedule of every algorithm that fits, the fewest bytes first."""
    entry = entry_of(OP)
    assert entry is not None, "the table has it"
    found = []
    for name in entry.algorithms:
        try:
            schedule = find_schedule(name, entry.algorithms, problem)
        except LayoutError:
            continue
        wanted = problem.result.final_spec(schedule.result)
        cost = schedule_cost(schedule, problem.operands, problem.result)
        found.append((Alternative(name, wanted, cost), schedule))
    return sorted(found, key=lambda pair: (pair[0].cost.bytes, pair[0].cost.exchanges))


def _name(schedule: Schedule, alternatives: list[tuple[Alternative, Schedule]]) -> str:
    """The name of the algorithm that a schedule is, if it is the best schedule of one."""
    same = [found.algorithm for found, other in alternatives if other.rounds == schedule.rounds]
    return same[0] if same else "mixed"


def _described(name: str, built: _BuiltProduct, alternatives: tuple[Alternative, ...]) -> ProductPlan:
    schedule, problem = built.schedule, built.problem
    result = problem.result
    moves, pairs, host_bytes = [], Counter[tuple[int, int]](), 0.0
    for tensor, number, meta, source, target in _movements(built):
        itemsize = ITEM_BYTES[meta.dtype]
        plan = plan_reshard(meta.shape, itemsize, source, target)
        for step, nbytes in zip(plan.steps, plan.step_bytes, strict=True):
            if nbytes:
                host_bytes += nbytes * host_share(step.kind, step.axes, step.target.mesh)
                moves.append(PlannedMove(tensor, number, step.kind, step.axes, nbytes))
                pairs.update(bytes_by_pair(step, meta.shape, itemsize))
    flops = 2 * math.prod([factor.size for factor in problem.rule.factors.values()])
    return ProductPlan(
        name,
        tuple([operand.spec for operand in problem.operands]),
        result.final_spec(schedule.result),
        len(schedule.rounds),
        tuple(moves),
        sum(move.bytes for move in moves),
        dict(pairs),
        flops,
        max(_worker_flops(schedule, problem, worker) for worker in schedule.result.mesh.workers),
        schedule_cost(schedule, problem.operands, result).memory,
        alternatives,
        round(host_bytes),
    )


def _movements(built: _BuiltProduct) -> Iterator[tuple[str, int, TensorMeta, ShardingSpec, ShardingSpec]]:
    """All moves, operand by operand: the tensor, the round, its shape and dtype, and its layouts before and after."""
    rounds = built.schedule.rounds
    for position, copied in enumerate(built.copied_views):
        yield from [("ab"[position], 0, *move) for move in copied]
    for position, source, target in built.moved_inputs:
        yield "ab"[position], int(len(rounds) == 1), built.bases[position], source, target
    names = {register: "ab"[position] for register, position in built.takes.items()}
    windows = {"ab"[position]: [layouts[position] for layouts in rounds] for position in (0, 1)}
    found: dict[str, list[tuple[str, int, TensorMeta, ShardingSpec, ShardingSpec]]] = {"a": [], "b": [], "out": []}
    reached = {"a": 0, "b": 0}
    for step in built.program.steps:
        if isinstance(step, Move):
            name = names[step.output] = names[step.input]
            source, target = spec_of(step.source), spec_of(step.target)
            if (
                name != "out" and target in windows[name][reached[name] :]
            ):  # moves to a start are before the first round
                reached[name] = windows[name].index(target, reached[name]) + 1
            found[name].append((name, reached.get(name, len(rounds)), step.meta, source, target))
        elif isinstance(step, Compute):
            names.update(dict.fromkeys(step.outputs, names[step.inputs[0]] if step.is_view else "out"))
    for moves in found.values():
        yield from moves


def _worker_flops(schedule: Schedule, problem: ScheduleProblem, worker: int) -> int:
    """Two for each element of the result and of the summed factors that a worker has, in all rounds."""
    own = math.prod(compute_local_shape(schedule.result, problem.result.shape, worker))
    rule, first = problem.rule, problem.operands[0]
    given = {ref.factor for dim in rule.results[0] for ref in dim}
    summed = [dim for dim, refs in enumerate(rule.operands[0]) if any(ref.factor not in given for ref in refs)]
    lengths = [compute_local_shape(layouts[0], first.shape, worker) for layouts in schedule.rounds]
    return sum(2 * own * math.prod([length[dim] for dim in summed]) for length in lengths)


def _lines(plan: ProductPlan) -> Iterator[str]:
    left, right = plan.operands
    yield f"[{left}] @ [{right}] -> [{plan.out}] by {plan.algorithm}, {plan.rounds} round{'s' * (plan.rounds > 1)}"
    between = f", {plan.host_bytes:,} of them between hosts" if plan.out.mesh.hosts else ""
    yield f"  {plan.bytes:,} bytes moved{between}; {plan.flops:,} FLOPs, {plan.worker_flops:,} on the busiest worker;"
    yield f"  at most {plan.memory:,} bytes on a worker beside the operands"
    for move in plan.moves:
        along = f" along {' '.join(move.axes)}" if move.axes else ""
        yield f"  round {move.round:>2}  {move.tensor:<3}  {move.kind}{along}: {move.bytes:,} bytes"
    yield "  alternatives:"
    yield f"  {'algorithm':<14}{'bytes':>15}{'exchanges':>11}{'memory':>15}  result"
    for each in plan.alternatives:
        cost = each.cost
        yield f"  {each.algorithm:<14}{cost.bytes:>15,}{cost.exchanges:>11}{cost.memory:>15,}  [{each.out}]"
