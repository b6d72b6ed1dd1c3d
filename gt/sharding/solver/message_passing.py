"""A fast approximate solver of choice problems, by message passing (TRW-S) and local search. It also gives a lower
bound of the cost of every assignment, and shows which choices cannot be part of a better one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gt.sharding.solver.pairwise_model import Assignment, Costs, PairwiseModel

ROUNDS = 200
SETTLED = 12  # rounds in which the bound has to rise
_ENOUGH = 1e-4  # share of itself by which the bound has to rise
_CLOSE = 1e-7


class Approximation(NamedTuple):
    """An assignment, its cost, a lower bound of all costs, and the choices of each variable that an assignment below
    the cutoff may have."""

    chosen: Assignment
    cost: float
    bound: float
    possible: tuple[tuple[int, ...], ...]


def approximate(model: PairwiseModel, rounds: int = ROUNDS, cutoff: float | None = None) -> Approximation:
    """A good assignment, with a bound. The `cutoff` is its own cost if none is given."""
    passing = _MessagePassing(model)
    best, cost = [0] * len(model.unary), np.inf
    history: list[float] = []
    for number in range(rounds):
        passing.sweep()
        history.append(passing.bound)
        if number % 4 == 3 or number == rounds - 1:
            found = improve(model, passing.decode())
            if model.cost(found) < cost:
                best, cost = found, model.cost(found)
            if cost - passing.bound <= _CLOSE * abs(cost) or _has_settled(history):
                break
    return Approximation(best, cost, min(passing.bound, cost), passing.possible(cost if cutoff is None else cutoff))


def _has_settled(history: list[float]) -> bool:
    """Whether the bound has hardly risen in the last rounds."""
    return len(history) > SETTLED and history[-1] - history[-SETTLED] <= _ENOUGH * abs(history[-1])


def improve(model: PairwiseModel, chosen: Assignment) -> Assignment:
    """Change single choices as long as that lowers the cost."""
    chosen = list(chosen)
    around: list[list[tuple[int, Costs]]] = [[] for _ in model.unary]
    for (i, j), costs in model.pairs.items():
        around[i].append((j, costs))
        around[j].append((i, costs.T))
    waiting = dict.fromkeys(range(len(chosen)))
    while waiting:
        variable = next(iter(waiting))
        del waiting[variable]
        total = model.unary[variable].copy()
        for other, costs in around[variable]:
            total += costs[:, chosen[other]]
        if total.min() < total[chosen[variable]] - 1e-15:
            chosen[variable] = int(total.argmin())
            waiting.update(dict.fromkeys([other for other, _ in around[variable]]))
    return chosen


class _MessagePassing:
    """Messages along the pairs of variables, in both directions: what each choice of the receiver costs the sender.
    `bound` is the lower bound after the last sweep."""

    def __init__(self, model: PairwiseModel) -> None:
        self._model = model
        self._costs: dict[tuple[int, int], Costs] = {}
        self._messages: dict[tuple[int, int], Costs] = {}
        self._around: list[list[int]] = [[] for _ in model.unary]
        for (i, j), costs in model.pairs.items():
            self._costs[i, j], self._costs[j, i] = costs, costs.T
            self._messages[i, j], self._messages[j, i] = np.zeros(costs.shape[1]), np.zeros(costs.shape[0])
            self._around[i].append(j)
            self._around[j].append(i)
        earlier = [[n for n in around if n < i] for i, around in enumerate(self._around)]
        later = [[n for n in around if n > i] for i, around in enumerate(self._around)]
        self._sides = (later, earlier)
        self._share = [1 / max(1, len(before), len(after)) for before, after in zip(earlier, later, strict=True)]
        self._extra: list[Costs] = [np.zeros(0)] * len(model.unary)
        self.bound = self._bound_before = -np.inf

    def _belief(self, variable: int) -> Costs:
        total = self._model.unary[variable].copy()
        for other in self._around[variable]:
            total += self._messages[other, variable]
        return total

    def sweep(self) -> None:
        """Pass messages forwards through the variables, then backwards. The costs that are taken out of beliefs and
        messages on the way back add up to a bound."""
        count = len(self._model.unary)
        later, earlier = self._sides
        for variable in range(count):
            self._pass_on(variable, self._belief(variable), later[variable])
        total = 0.0
        for variable in range(count - 1, -1, -1):
            belief = self._belief(variable)
            least = float(belief.min())
            self._extra[variable] = belief - least
            total += least + self._pass_on(variable, self._extra[variable], earlier[variable])
        self._bound_before, self.bound = self.bound, max(self.bound, total)

    def _pass_on(self, variable: int, belief: Costs, receivers: list[int]) -> float:
        """Send messages, and return what was taken out of them so that the least of each is 0."""
        own, taken = self._share[variable] * belief, 0.0
        for other in receivers:
            rest = own - self._messages[other, variable]
            message = (rest[:, None] + self._costs[variable, other]).min(0)
            least = float(message.min())
            self._messages[variable, other] = message - least
            taken += least
        return taken

    def decode(self) -> Assignment:
        chosen: Assignment = []
        for variable in range(len(self._around)):
            total = self._model.unary[variable]
            for other in self._around[variable]:
                if other < variable:
                    total = total + self._costs[other, variable][chosen[other]]
                else:
                    total = total + self._messages[other, variable]
            chosen.append(int(total.argmin()))
        return chosen

    def possible(self, cost: float) -> tuple[tuple[int, ...], ...]:
        """The choices that do not raise the bound beyond a cost."""
        slack = max(cost - self._bound_before, 0) + 1e-9 * abs(cost)
        return tuple([tuple([int(n) for n in np.flatnonzero(extra <= slack)]) for extra in self._extra])
