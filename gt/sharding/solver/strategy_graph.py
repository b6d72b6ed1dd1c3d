"""A recorded program as a choice problem: a variable for each op (its strategies), for each tensor that exists before
the step (its layouts), and for each value that several ops use or that passes between modules (the layout in which it
stays). Pairs cost the time to move a value from the layout that one side gives to the one that the other needs.

Nothing here names an op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from gt.core.meta import TensorMeta
from gt.sharding.calibration import Calibration
from gt.sharding.op_calls import OpCall
from gt.sharding.solver.lifetimes import memory_rows, update_groups
from gt.sharding.solver.op_strategies import MachineKey, call_strategies, layouts_of, move_cost, shard_bytes
from gt.sharding.solver.pairwise_model import Assignment, Costs, ModelBuilder, PairwiseModel
from gt.sharding.solver.recorded_program import PARAMETER, RecordedOp, RecordedProgram
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.strategies import OpStrategy

BUCKET = 8  # gradients that are reduced together, about


@dataclass(frozen=True, eq=False)
class GraphVariable:
    """A variable of the problem: `kind` is op, stored or resting, `name` that of the value, or the number of the op as
    text. `layouts` are, per choice, the layouts that it gives: of each output of an op, or the one of the value."""

    kind: str
    name: str
    layouts: tuple[tuple[ShardingSpec, ...], ...]


class StrategyGraph(NamedTuple):
    """The problem of a program on a mesh.

    - `stored`: the variables of the tensors that exist before the step, by name
    - `resting`: the variables of the layouts in which values stay, by name
    - `ops`: the variables of ops, by number
    """

    model: PairwiseModel
    variables: tuple[GraphVariable, ...]
    stored: Mapping[str, int]
    resting: Mapping[str, int]
    ops: Mapping[int, int]

    def layout(self, value: str, chosen: Sequence[int]) -> ShardingSpec | None:
        """The layout in which a value stays; None if it has no variable."""
        number = self.resting.get(value, self.stored.get(value))
        return None if number is None else self.variables[number].layouts[chosen[number]][0]


def build_graph(
    program: RecordedProgram,
    mesh: DeviceMesh,
    machine: Calibration,
    fixed: Mapping[str, ShardingSpec] | None = None,
    hidden: float = 0.0,
) -> StrategyGraph:
    """The choice problem of a program. Values with a `fixed` layout have no other. `hidden` is the share of the time of
    moves of gradients in which workers compute: a choice problem knows no order in time, so it is given."""
    return _GraphBuilder(program, mesh, machine, fixed or {}, hidden).build()


class _Provider(NamedTuple):
    """The variable that gives a value, and the layout of the value for each of its choices."""

    variable: int
    layouts: tuple[ShardingSpec, ...]


class _GraphBuilder:
    def __init__(
        self,
        program: RecordedProgram,
        mesh: DeviceMesh,
        machine: Calibration,
        fixed: Mapping[str, ShardingSpec],
        hidden: float,
    ) -> None:
        self._program = program
        self._mesh = mesh
        self._machine = machine
        self._key = MachineKey(machine)
        self._bucketed = MachineKey(_sharing_messages(machine))
        self._fixed = fixed
        self._hidden = hidden
        self._builder = ModelBuilder()
        self._variables: list[GraphVariable] = []
        self._stored: dict[str, int] = {}
        self._resting: dict[str, int] = {}
        self._ops: dict[int, int] = {}
        self._providers: dict[str, _Provider] = {}
        self._strategies: dict[object, list[tuple[OpStrategy, float]]] = {}
        self._moves: dict[object, Costs] = {}
        self._groups = update_groups(program)
        self._uses = self._count_uses()
        self._passing = {each for boundary in program.boundaries for each in (boundary.value, boundary.view)}

    def _count_uses(self) -> dict[str, int]:
        uses: dict[str, int] = {}
        for number, op in enumerate(self._program.ops):
            if number not in self._groups.of_op:
                for value in op.inputs:
                    uses[value] = uses.get(value, 0) + 1
        for value, _ in self._groups.gradients:
            uses[value] = uses.get(value, 0) + 1
        return uses

    def build(self) -> StrategyGraph:
        made = {value for op in self._program.ops for value in op.outputs}
        for value in self._program.values:
            if value not in made and value not in self._groups.of_value and self._is_used(value):
                self._store(value)
        for number, op in enumerate(self._program.ops):
            if number not in self._groups.of_op:
                self._add_op(number, op)
        self._add_updates()
        memory = memory_rows(
            self._program, self._groups, self._bytes_by_choice(), [len(u) for u in self._builder.unary]
        )
        model = PairwiseModel(tuple(self._builder.unary), self._builder.pairs, memory)
        return StrategyGraph(model, tuple(self._variables), self._stored, self._resting, self._ops)

    def _is_used(self, value: str) -> bool:
        return value in self._uses or self._program.roles[value] == PARAMETER

    def _variable(
        self, kind: str, name: str, layouts: Sequence[tuple[ShardingSpec, ...]], costs: Sequence[float]
    ) -> int:
        self._variables.append(GraphVariable(kind, name, tuple(layouts)))
        return self._builder.variable(costs)

    # Tensors that exist before the step

    def _store(self, value: str) -> None:
        layouts = layouts_of(self._program.values[value], self._mesh)
        if value in self._fixed:
            layouts = [self._fixed[value]]
        variable = self._variable("stored", value, [(spec,) for spec in layouts], [0.0] * len(layouts))
        self._stored[value] = variable
        self._provide(value, _Provider(variable, tuple(layouts)))

    # Ops

    def _call_strategies(self, op: RecordedOp) -> list[tuple[OpStrategy, float]]:
        if not op.call.op:
            return _write_backs(op.call, self._mesh)
        key = (op.call.op, op.call.args, tuple(op.call.kwargs.items()), op.call.inputs, op.call.outputs, op.is_view)
        if key not in self._strategies:
            self._strategies[key] = call_strategies(op.call, self._mesh, self._machine, op.is_view)
        return self._strategies[key]

    def _add_op(self, number: int, op: RecordedOp) -> None:
        strategies = _keeping_targets(op, self._call_strategies(op))
        times = [time for _, time in strategies]
        variable = self._variable("op", str(number), [strategy.results for strategy, _ in strategies], times)
        self._ops[number] = variable
        taken = op.inputs if op.call.op else op.inputs[:1]  # a part that is written through a view comes as it is
        for position, value in enumerate(taken):
            needed = tuple([strategy.operands[position] for strategy, _ in strategies])
            factor = 2.0 if value in op.written else 1.0  # moved to be written, and moved back
            self._take(value, _Provider(variable, needed), factor)
        for output, value in enumerate(op.outputs):
            given = tuple([strategy.results[output] for strategy, _ in strategies])
            self._provide(value, _Provider(variable, given))

    def _provide(self, value: str, provider: _Provider) -> None:
        """Note the variable that gives a value. A value that is used repeatedly, or passes between modules, gets
        its own variable: it is moved once, for all uses."""
        self._providers[value] = provider
        if self._uses.get(value, 0) < 2 and value not in self._passing:
            return
        if provider.variable in self._stored.values():
            return
        if value in self._fixed:
            layouts = [self._fixed[value]]
        else:
            layouts = list(dict.fromkeys([*provider.layouts, *layouts_of(self._program.values[value], self._mesh)]))
        variable = self._variable("resting", value, [(spec,) for spec in layouts], [0.0] * len(layouts))
        self._resting[value] = variable
        resting = _Provider(variable, tuple(layouts))
        self._connect(value, provider, resting)
        self._providers[value] = resting

    def _take(self, value: str, taker: _Provider, factor: float = 1.0) -> None:
        """Count the moves of a value to the layouts that an op needs. Results of updates are in their parameter's."""
        giver = self._providers.get(value) or self._providers[self._groups.of_value[value]]
        self._connect(value, giver, taker, factor)

    def _connect(
        self, value: str, giver: _Provider, taker: _Provider, factor: float = 1.0, machine: MachineKey | None = None
    ) -> None:
        meta = self._program.values[value]
        costs = self._move_costs(meta, giver.layouts, taker.layouts, machine or self._key)
        if costs.any():
            self._builder.add_pair(giver.variable, taker.variable, factor * costs)

    def _move_costs(
        self,
        meta: TensorMeta,
        givers: tuple[ShardingSpec, ...],
        takers: tuple[ShardingSpec, ...],
        machine: MachineKey,
    ) -> Costs:
        key = (meta.shape, meta.dtype, givers, takers, machine)
        if key not in self._moves:
            distinct = {
                (one, other): move_cost(meta, one, other, machine).seconds
                for one in dict.fromkeys(givers)
                for other in dict.fromkeys(takers)
            }
            self._moves[key] = np.array([[distinct[one, other] for other in takers] for one in givers])
        return self._moves[key]

    # The optimizer's step

    def _add_updates(self) -> None:
        """The update of a parameter runs in its layout, to which its gradient is moved."""
        for parameter, numbers in self._groups.ops.items():
            provider = self._providers[parameter]
            times = [sum([self._update_seconds(number, spec) for number in numbers]) for spec in provider.layouts]
            self._builder.add_costs(provider.variable, np.array(times))
        for value, parameter in self._groups.gradients:
            if value in self._providers:
                one, other = self._providers[value], self._providers[parameter]
                self._connect(value, one, other, 1 - self._hidden, machine=self._bucketed)

    def _update_seconds(self, number: int, spec: ShardingSpec) -> float:
        call = self._program.ops[number].call
        nbytes = sum(
            [shard_bytes(meta, spec) for meta in (*call.inputs, *call.outputs) if len(meta.shape) == len(spec.dims)]
        )
        return nbytes / self._machine.memory_bandwidth  # the ops of many parameters are one call

    # Memory

    def _bytes_by_choice(self) -> dict[str, tuple[int, Costs]]:
        """The variable of each value, and the bytes of the largest shard for each of its choices."""
        found = {}
        for value, (variable, layouts) in self._providers.items():
            meta = self._program.values[value]
            found[value] = (variable, np.array([shard_bytes(meta, spec) for spec in layouts], dtype=float))
        return found


def _sharing_messages(machine: Calibration) -> Calibration:
    """The speeds for gradients, which are reduced many together: each has a part of the messages."""
    axes = {axis: (seconds / BUCKET, bandwidth) for axis, (seconds, bandwidth) in machine.axes.items()}
    return msgspec.structs.replace(
        machine,
        message_seconds=machine.message_seconds / BUCKET,
        host_message_seconds=machine.host_message_seconds / BUCKET,
        axes=axes,
    )


def _keeping_targets(op: RecordedOp, strategies: list[tuple[OpStrategy, float]]) -> list[tuple[OpStrategy, float]]:
    """The strategies in which each written value keeps its layout; all of them if there are none."""
    pairs = [(op.inputs.index(base), output) for output, base in enumerate(op.written) if base and base in op.inputs]
    kept = [(s, time) for s, time in strategies if all(s.operands[i] is s.results[o] for i, o in pairs)]
    return kept or strategies


def _write_backs(call: OpCall, mesh: DeviceMesh) -> list[tuple[OpStrategy, float]]:
    """A value is written through a view: the tensor keeps its layout, and the part comes as it is."""
    part = ShardingSpec(mesh, [()] * len(call.inputs[1].shape))
    return [(OpStrategy((spec, part), (spec,), {}), 0.0) for spec in layouts_of(call.inputs[0], mesh)]


# So a problem does not grow with the number of layers.


ROUNDS = 12  # how far the surroundings of a variable are compared


class MergedModel:
    """A model in which each class of alike variables is one variable. `classes` are the classes of the variables."""

    def __init__(self, model: PairwiseModel, classes: Sequence[int]) -> None:
        self.classes = list(classes)
        count = max(self.classes, default=-1) + 1
        builder = ModelBuilder()
        memory: list[object] = [None] * count
        first = {own: variable for variable, own in reversed(list(enumerate(self.classes)))}
        for own in range(count):
            builder.variable(0 * model.unary[first[own]])
        for variable, own in enumerate(self.classes):
            builder.add_costs(own, model.unary[variable])
            memory[own] = model.memory[variable] if memory[own] is None else memory[own] + model.memory[variable]  # type: ignore[operator]
        for (i, j), costs in model.pairs.items():
            builder.add_pair(self.classes[i], self.classes[j], costs)
        self.model = PairwiseModel(tuple(builder.unary), builder.pairs, tuple(memory))  # type: ignore[arg-type]

    def complete(self, chosen: Assignment) -> Assignment:
        """The assignment of all variables."""
        return [chosen[own] for own in self.classes]


def alike(graph: StrategyGraph, rounds: int = ROUNDS) -> list[int]:
    """The class of each variable. Two variables are alike if they have the same choices and costs, and so have those
    around them, up to some distance."""
    model = graph.model
    labels = [
        hash((variable.kind, variable.layouts, costs.tobytes()))
        for variable, costs in zip(graph.variables, model.unary, strict=True)
    ]
    around: list[list[tuple[int, int]]] = [[] for _ in labels]
    contents: dict[int, int] = {}  # hashing a matrix once is enough: alike pairs share it
    for (i, j), costs in model.pairs.items():
        content = contents.setdefault(id(costs), hash((costs.shape, costs.tobytes())))
        around[i].append((j, hash((content, 0))))
        around[j].append((i, hash((content, 1))))
    for _ in range(rounds):
        labels = [
            hash((label, tuple(sorted([hash((content, labels[other])) for other, content in own]))))
            for label, own in zip(labels, around, strict=True)
        ]
    numbers: dict[int, int] = {}
    return [numbers.setdefault(label, len(numbers)) for label in labels]
