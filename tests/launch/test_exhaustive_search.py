"""The solver against a search over all strategies of small programs, which knows nothing of its choice problem."""

from collections import Counter

import pytest
import torch

import gt
from gt.client.step_recorder import find_step_objects, record_steps
from gt.sharding.solver.graph_reduction import undominated_choices
from gt.sharding.solver.linear_program import solve_exactly
from gt.sharding.solver.message_passing import approximate
from gt.sharding.solver.op_strategies import MachineKey, call_strategies, layouts_of, move_cost
from gt.sharding.solver.recorded_program import program_of
from gt.sharding.solver.simple_solver import SimpleSolver
from gt.sharding.solver.strategy_graph import build_graph

SLOW_LINKS = gt.Calibration(flops=1e9, memory_bandwidth=1e9, op_seconds=1e-6, message_seconds=1e-6, link_bandwidth=1e8)
FAST_LINKS = gt.Calibration(flops=1e8, memory_bandwidth=1e9, op_seconds=1e-6, message_seconds=1e-8, link_bandwidth=1e9)


class ExhaustiveSearch:
    """Tries every layout of tensors that exist before a step, every strategy of each op, and every layout in which a
    result stays that several ops use or that passes between modules. Costs are added up in the order of the program; a
    part that costs more than the best whole, with the least that the rest can cost, is not completed."""

    def __init__(self, program, mesh, machine):
        self._program, self._mesh, self._machine = program, mesh, MachineKey(machine)
        self._uses = Counter(value for op in program.ops for value in op.inputs)
        self._passing = {value for boundary in program.boundaries for value in (boundary.value, boundary.view)}
        self._decisions = list(self._list_decisions())
        least = [min(time for _, time in options) if kind == "op" else 0.0 for kind, _, options in self._decisions]
        self._rest = [sum(least[number:]) for number in range(len(least) + 1)]
        self.best = float("inf")
        self.tried = 0

    def _list_decisions(self):
        made = {value for op in self._program.ops for value in op.outputs}
        for op in self._program.ops:
            assert op.call.op and not any(op.written)
            for value in dict.fromkeys(op.inputs):
                if value not in made:
                    made.add(value)
                    yield "stored", value, [(spec, 0.0) for spec in self._layouts(value)]
            strategies = call_strategies(op.call, self._mesh, self._machine.calibration, op.is_view)
            yield "op", op, strategies
            for output, value in enumerate(op.outputs):
                if self._uses[value] > 1 or value in self._passing:
                    given = [strategy.results[output] for strategy, _ in strategies]
                    yield "resting", value, [(spec, 0.0) for spec in dict.fromkeys([*given, *self._layouts(value)])]

    def _layouts(self, value):
        return layouts_of(self._program.values[value], self._mesh)

    def _move(self, value, source, target):
        return move_cost(self._program.values[value], source, target, self._machine).seconds

    def _cost(self, kind, subject, choice, time, layouts):
        if kind == "op":
            needed = zip(subject.inputs, choice.operands, strict=True)
            return time + sum(self._move(value, layouts[value], spec) for value, spec in needed)
        return self._move(subject, layouts[subject], choice) if kind == "resting" else 0.0

    def run(self, number=0, cost=0.0, layouts=None):
        layouts = layouts or {}
        if number == len(self._decisions):
            self.best, self.tried = cost, self.tried + 1
            return
        kind, subject, options = self._decisions[number]
        costs = [cost + self._cost(kind, subject, choice, time, layouts) for choice, time in options]
        for position in sorted(range(len(options)), key=costs.__getitem__):
            if costs[position] + self._rest[number + 1] >= self.best * (1 - 1e-9):
                return
            choice = options[position][0]
            given = dict(zip(subject.outputs, choice.results, strict=True)) if kind == "op" else {subject: choice}
            self.run(number + 1, costs[position], {**layouts, **given})


def linear(inputs, outputs, bias=False):
    return torch.nn.Linear(inputs, outputs, bias=bias)


class Program(torch.nn.Module):
    """A program of up to eight ops."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.square, self.biased = linear(8, 16), linear(16, 8), linear(8, 8), linear(8, 8, True)

    def chain(self, x):
        return self.down(self.up(x).relu()).relu().sum()

    def branches(self, x):
        return (self.square(x).relu() * self.biased(x)).sum()

    def shared_weight(self, x):
        return self.square(self.square(x).relu()).relu()

    def reduction(self, x):
        return self.up(x).softmax(-1).mean(0)

    def residual(self, x):
        return x + self.down(self.up(x).relu())

    def normalized(self, x):
        return torch.nn.functional.layer_norm(self.square(x) + x, (8,)).sum()

    def backward(self, x):
        self.biased(x).sum().backward()

    def deep_backward(self, x):
        self.square(x.mT).relu().sum().backward()

    def forward(self, name, x):
        return getattr(self, name)(x)


NAMES = ["chain", "branches", "shared_weight", "reduction", "residual", "normalized", "backward", "deep_backward"]
MESHES = [(2,), (4,), (2, 2)]
TOO_LARGE = [("deep_backward", (2, 2))]  # takes a minute
CASES = [(name, shape) for name in NAMES for shape in MESHES if (name, shape) not in TOO_LARGE]


@pytest.fixture(autouse=True)
def session():
    gt.shutdown()
    gt.init(workers=4, mode="shapes")
    yield
    gt.shutdown()


def recorded(name):
    model, x = gt.to(Program()), gt.to(torch.ones(8, 8))

    def step():
        model.zero_grad()
        model(name, x)

    return program_of(record_steps(step, (), find_step_objects(step, ())))


@pytest.mark.parametrize("machine", [SLOW_LINKS, FAST_LINKS], ids=["slow", "fast"])
@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_no_choice_of_strategies_is_cheaper_than_the_solvers(name, shape, machine):
    program, mesh = recorded(name), gt.mesh(shape, ("x", "y")[: len(shape)])
    assert 3 <= len([op for op in program.ops if not op.is_view]) <= 8
    search = ExhaustiveSearch(program, mesh, machine)
    search.run()
    model = build_graph(program, mesh, machine).model
    for method in ("exact", "auto", "fast"):
        found = SimpleSolver(method).solve(model)
        assert found.bound <= search.best * (1 + 1e-9)
        assert found.cost >= search.best * (1 - 1e-9)
        assert method == "fast" or found.cost == pytest.approx(search.best, rel=1e-9)
    _check_without_elimination(model, search.best)


def _check_without_elimination(model, best):
    """The linear program and message passing on the whole problem, of which elimination would leave nothing."""
    passed = approximate(model, cutoff=best)
    assert passed.bound <= best * (1 + 1e-9) and passed.cost >= best * (1 - 1e-9)
    small = model.restricted([own or [0] for own in passed.possible])
    exact = solve_exactly(small, (), 60)
    assert small.cost(exact.chosen) == pytest.approx(best, rel=1e-6) == pytest.approx(exact.bound, rel=1e-6)
    undominated = model.restricted(undominated_choices(model))
    assert SimpleSolver().solve(undominated).cost == pytest.approx(best, rel=1e-9)
