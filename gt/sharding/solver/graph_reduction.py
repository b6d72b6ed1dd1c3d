"""Removes variables with at most two neighbours from a choice problem. Each is replaced by the cost of its best choice,
which depends on its neighbours alone, so the optimum stays the same. Programs are mostly chains: few variables
remain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gt.sharding.solver.pairwise_model import Assignment, Costs, PairwiseModel


def undominated_choices(model: PairwiseModel) -> list[list[int]]:
    """The choices of each variable that remain. The neighbours of a variable have lost their dominated choices when it
    is looked at, if they come before it."""
    kept: list[NDArray[np.int64]] = [np.arange(len(costs)) for costs in model.unary]
    around: list[list[tuple[int, Costs]]] = [[] for _ in model.unary]
    for (i, j), costs in model.pairs.items():
        around[i].append((j, costs))
        around[j].append((i, costs.T))
    for variable, neighbours in enumerate(around):
        own = kept[variable]
        if len(own) > 1:
            tables = [costs[np.ix_(own, kept[other])] for other, costs in neighbours]
            kept[variable] = own[_is_needed(model.unary[variable][own], tables)]
    return [own.tolist() for own in kept]


def _is_needed(unary: Costs, tables: list[Costs]) -> NDArray[np.bool_]:
    """Whether each choice is cheaper than any other one for some choices of the neighbours; of equal choices the first
    one is needed."""
    count = len(unary)
    needed = np.ones(count, bool)
    for choice in range(count):
        change = unary - unary[choice]  # the most that another choice can change the cost
        for table in tables:
            change = change + (table - table[choice]).max(1)
        replaces = change < 0
        replaces[:choice] |= change[:choice] == 0
        needed[choice] = not replaces.any()
    return needed


class _Removed(NamedTuple):
    """A removed variable, its neighbours, and its best choice for each combination of their choices."""

    variable: int
    neighbours: tuple[int, ...]
    best: NDArray[np.int64]


class ReducedModel:
    """A model without the variables that could be removed, and without the dominated choices of the others, whose
    numbers are `variables`."""

    def __init__(self, model: PairwiseModel) -> None:
        self._unary: list[Costs] = list(model.unary)
        self._pairs: list[dict[int, Costs]] = [{} for _ in model.unary]  # oriented: (own choices, the neighbour's)
        for (i, j), costs in model.pairs.items():
            self._pairs[i][j], self._pairs[j][i] = costs, costs.T
        self._removed: list[_Removed] = []
        self._gone: set[int] = set()
        self._reduce()
        self.variables = [n for n in range(len(self._unary)) if n not in self._gone]
        number = {variable: n for n, variable in enumerate(self.variables)}
        pairs = {(number[i], number[j]): costs for i in self.variables for j, costs in self._pairs[i].items() if i < j}
        unary = tuple([self._unary[variable] for variable in self.variables])
        core = PairwiseModel(unary, pairs, tuple([np.zeros((0, len(costs))) for costs in unary]))
        self._kept = undominated_choices(core)
        self.core = core.restricted(self._kept)

    def _reduce(self) -> None:
        waiting = [n for n in range(len(self._unary)) if len(self._pairs[n]) <= 2]
        while waiting:
            variable = waiting.pop()
            if variable in self._gone or len(self._pairs[variable]) > 2:
                continue
            neighbours = tuple(self._pairs[variable])
            self._remove(variable, neighbours)
            waiting.extend(n for n in neighbours if len(self._pairs[n]) <= 2)

    def _remove(self, variable: int, neighbours: tuple[int, ...]) -> None:
        costs = self._unary[variable]
        if not neighbours:
            best = np.array(costs.argmin())
        elif len(neighbours) == 1:
            (one,) = neighbours
            total = costs[:, None] + self._pairs[variable][one]  # (own, one)
            best = total.argmin(0)
            self._unary[one] = self._unary[one] + total.min(0)
        else:
            one, other = neighbours
            total = (costs[:, None] + self._pairs[variable][one])[:, :, None] + self._pairs[variable][other][:, None]
            best = total.argmin(0)  # (one, other)
            self._add_pair(one, other, total.min(0))
        for neighbour in neighbours:
            del self._pairs[neighbour][variable]
        self._gone.add(variable)
        self._removed.append(_Removed(variable, neighbours, best))

    def _add_pair(self, one: int, other: int, costs: Costs) -> None:
        if other in self._pairs[one]:
            costs = costs + self._pairs[one][other]
        self._pairs[one][other], self._pairs[other][one] = costs, costs.T

    def complete(self, core: Assignment) -> Assignment:
        """The best assignment of all variables, given that of the remaining ones."""
        chosen = [0] * len(self._unary)
        for variable, choice, kept in zip(self.variables, core, self._kept, strict=True):
            chosen[variable] = kept[choice]
        for variable, neighbours, best in reversed(self._removed):
            chosen[variable] = int(best[tuple([chosen[n] for n in neighbours])])
        return chosen
