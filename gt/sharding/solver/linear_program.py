"""The exact solver of choice problems: a linear program, solved by HiGHS. Its relaxation is mostly integral; otherwise
HiGHS branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gt.core.environment import load_extra
from gt.sharding.solver.pairwise_model import Assignment, Costs, PairwiseModel

INTEGRAL = 1e-6


class ExactAnswer(NamedTuple):
    """An assignment (None: none was found), a lower bound, and whether the relaxation was integral."""

    chosen: Assignment | None
    bound: float
    is_integral: bool


def solve_exactly(model: PairwiseModel, limits: Sequence[float], seconds: float) -> ExactAnswer:
    """The cheapest assignment that stays within limits, or the best one after some seconds."""
    optimize = load_extra("scipy.optimize", "solver", "the exact solver")
    program = _Program(model, limits)
    relaxed = optimize.milp(
        program.costs,
        constraints=program.constraints(optimize),
        bounds=optimize.Bounds(0, 1),
        options={"time_limit": seconds},
    )
    if relaxed.x is None:
        return ExactAnswer(None, np.inf if relaxed.status == 2 else -np.inf, False)
    bound = float(relaxed.fun) / program.scale if relaxed.status == 0 else -np.inf
    chosen = program.read(relaxed.x)
    if chosen is not None:
        return ExactAnswer(chosen, bound, True)
    solved = optimize.milp(
        program.costs,
        constraints=program.constraints(optimize),
        bounds=optimize.Bounds(0, 1),
        integrality=program.integrality(),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    found = None if solved.x is None else program.read(np.round(solved.x))
    proven = getattr(solved, "mip_dual_bound", None)
    return ExactAnswer(found, max(bound, -np.inf if proven is None else float(proven) / program.scale), False)


class _Program:
    """The linear program of a model: a variable for each choice, and for each pair of choices of a pair of variables.
    The choices of a variable add up to one, and those of a pair to the choices of either side."""

    def __init__(self, model: PairwiseModel, limits: Sequence[float]) -> None:
        self._sizes = [len(costs) for costs in model.unary]
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)]).astype(int)
        self._choices = int(self._starts[-1])
        parts = [*model.unary, *[costs.ravel() for costs in model.pairs.values()]]
        costs: Costs = np.concatenate(parts) if parts else np.zeros(0)
        self.scale = 1 / max(float(np.abs(costs).max(initial=0)), 1e-30)
        self.costs = costs * self.scale
        self._rows: list[Any] = []
        self._columns: list[Any] = []
        self._values: list[Any] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        for start, size in zip(self._starts, self._sizes, strict=False):
            self._add([np.zeros(size, int)], [np.arange(start, start + size)], [np.ones(size)], [1.0], [1.0])
        column = self._choices
        for (i, j), pair in model.pairs.items():
            column += self._add_pair(i, j, pair.shape, column)
        for row, limit in enumerate(limits):
            taken = np.concatenate([own[row] for own in model.memory]) / max(limit, 1.0)
            self._add([np.zeros(self._choices, int)], [np.arange(self._choices)], [taken], [-np.inf], [1.0])

    def _add_pair(self, i: int, j: int, shape: tuple[int, ...], column: int) -> int:
        numbers = np.arange(column, column + shape[0] * shape[1]).reshape(shape)
        for variable, table in ((i, numbers), (j, numbers.T)):
            own = np.arange(len(table))
            rows = [np.repeat(own, table.shape[1]), own]
            columns = [table.ravel(), self._starts[variable] + own]
            self._add(rows, columns, [np.ones(table.size), -np.ones(len(own))], [0.0] * len(own), [0.0] * len(own))
        return numbers.size

    def _add(self, rows: list[Any], columns: list[Any], values: list[Any], low: list[float], high: list[float]) -> None:
        """Add rows, numbered from 0."""
        self._rows += [own + len(self._lower) for own in rows]
        self._columns += columns
        self._values += values
        self._lower += low
        self._upper += high

    def constraints(self, optimize: Any) -> Any:
        sparse = load_extra("scipy.sparse", "solver", "the exact solver")
        shape = (len(self._lower), len(self.costs))
        entries = (np.concatenate(self._values), (np.concatenate(self._rows), np.concatenate(self._columns)))
        return optimize.LinearConstraint(sparse.csr_matrix(entries, shape=shape), self._lower, self._upper)

    def integrality(self) -> Costs:
        """Only the choices of single variables have to be whole numbers: those of pairs follow."""
        return np.concatenate([np.ones(self._choices), np.zeros(len(self.costs) - self._choices)])

    def read(self, solution: Costs) -> Assignment | None:
        """The assignment of a solution; None if it is not integral."""
        chosen = []
        for start, size in zip(self._starts, self._sizes, strict=False):
            own = solution[start : start + size]
            if own.max() < 1 - INTEGRAL:
                return None
            chosen.append(int(own.argmax()))
        return chosen
