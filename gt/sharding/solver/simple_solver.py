"""Chooses the cheapest assignment of a choice problem within limits of memory, and certifies how far it may be from the
best one.

Without limits: variables with few neighbours are removed exactly (graph_reduction.py), message passing gives an answer
and a bound for the rest, and where these differ, a linear program decides among the choices that the bound leaves
(linear_program.py). With limits, memory gets a price: the price that gives the highest bound is searched for, and the
assignments met on the way that stay within the limits are candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gt.core.errors import SettingsError
from gt.sharding.solver.graph_reduction import ReducedModel
from gt.sharding.solver.linear_program import ExactAnswer, solve_exactly
from gt.sharding.solver.message_passing import approximate
from gt.sharding.solver.pairwise_model import Assignment, Costs, PairwiseModel

EXACT, FAST, AUTO = "exact", "fast", "auto"
METHODS = (AUTO, EXACT, FAST)
MAX_PAIRS = 200_000  # pairs of choices for which a linear program is solved
PRICES = 24  # tried for memory
CLOSE = 1e-4  # a gap that is not worth a linear program


class Solution(NamedTuple):
    """An assignment and its cost. No assignment within the limits costs less than `bound`. `method` names what found
    it."""

    chosen: Assignment
    cost: float
    bound: float
    method: str

    @property
    def gap(self) -> float:
        """The share of the cost that a better assignment might save at most."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0


class SimpleSolver:
    """Solves choice problems. `method` "fast" leaves the linear program out, "exact" uses it whatever its size, for at
    most `seconds`. `progress` is called with a line for people at each stage."""

    def __init__(
        self, method: str = AUTO, seconds: float = 20.0, progress: Callable[[str], None] | None = None
    ) -> None:
        if method not in METHODS:
            raise SettingsError(f"the method of a solver is one of {', '.join(METHODS)}, not {method!r}")
        self._method = method
        self._seconds = seconds
        self._progress = progress or (lambda line: None)

    def solve(self, model: PairwiseModel, limits: Sequence[float] = ()) -> Solution | None:
        """The cheapest assignment that takes no more than the limits; None if there is none."""
        free = self._solve_free(model)
        if all(model.usage(free.chosen)[: len(limits)] <= np.array(limits)):
            return free
        return self._solve_limited(model, np.array(limits, dtype=float), free)

    def _solve_free(self, model: PairwiseModel) -> Solution:
        """The cheapest assignment without limits."""
        reduced = ReducedModel(model)
        core = reduced.core
        if not core.unary:
            chosen = reduced.complete([])
            return Solution(chosen, model.cost(chosen), model.cost(chosen), "elimination")
        self._progress(f"{len(model.unary)} variables, {len(core.unary)} of them after elimination")
        found = approximate(core)
        chosen = reduced.complete(found.chosen)
        cost = model.cost(chosen)
        bound = min(cost, found.bound + (cost - found.cost))  # elimination changes no cost but by a constant
        solution = Solution(chosen, cost, bound, "message passing")
        kept = [own or (choice,) for own, choice in zip(found.possible, found.chosen, strict=True)]
        small = core.restricted(kept)
        if self._method == FAST or solution.gap <= CLOSE * 1e-2 or not self._is_small(small):
            return solution
        self._progress(f"linear program of {_pairs(small)} pairs of choices")
        exact = self._solve_exactly(small, ())
        if exact.chosen is None:
            return solution
        picked = [own[choice] for own, choice in zip(kept, exact.chosen, strict=True)]
        chosen = reduced.complete(picked)
        exact_cost = model.cost(chosen)
        if exact_cost > cost:
            return solution._replace(bound=max(bound, min(cost, exact.bound + (cost - found.cost))))
        proven = max(bound, min(exact_cost, exact.bound + (exact_cost - core.cost(picked))))
        return Solution(chosen, exact_cost, proven, "linear program" if exact.is_integral else "branch and bound")

    def _solve_exactly(self, model: PairwiseModel, limits: Sequence[float]) -> ExactAnswer:
        """The answer of the linear program; none, by the method "auto", if its solver is not installed."""
        try:
            return solve_exactly(model, limits, self._seconds)
        except SettingsError as error:
            if self._method == EXACT:
                raise
            self._progress(str(error))
            return ExactAnswer(None, -math.inf, False)

    def _is_small(self, model: PairwiseModel) -> bool:
        return self._method == EXACT or _pairs(model) <= MAX_PAIRS

    # Limits

    def _solve_limited(self, model: PairwiseModel, limits: Costs, free: Solution) -> Solution | None:
        search = _PriceSearch(model, limits, free)
        for number in range(PRICES):
            prices = search.next_prices()
            if prices is None:
                break
            priced = self._solve_free(model.priced(prices))
            search.add(prices, priced)
            self._progress(f"price {number + 1} of memory: {search.describe()}")
            if search.best is not None and search.best.gap <= CLOSE:
                break
        if search.best is None:
            search.add_smallest(self._solve_free(_only_memory(model, limits)).chosen)
        if self._method != FAST and (search.best is None or search.best.gap > CLOSE):
            self._decide(model, limits, search)
        return search.best

    def _decide(self, model: PairwiseModel, limits: Costs, search: _PriceSearch) -> None:
        """Solve the linear program with limits, on the choices that the bound leaves, if it is small."""
        kept = search.possible()
        small = model.restricted(kept)
        if self._is_small(small):
            self._progress(f"linear program of {_pairs(small)} pairs of choices, with memory")
            exact = self._solve_exactly(small, limits.tolist())
            chosen = exact.chosen and [own[c] for own, c in zip(kept, exact.chosen, strict=True)]
            search.add_exact(chosen, exact.bound)


class _PriceSearch:
    """Looks for the prices of limited amounts that give the highest bound: scales one price per limit up and down, the
    one of the amount that is exceeded most."""

    def __init__(self, model: PairwiseModel, limits: Costs, free: Solution) -> None:
        self._model = model
        self._limits = limits
        self._bound = free.bound
        self.best: Solution | None = None
        self._low = np.zeros(len(limits))
        self._high: Costs | None = None
        excess = np.maximum(model.usage(free.chosen) - limits, 0)
        self._direction = excess / max(float(excess.sum()), 1.0)
        self._unit = free.cost / max(float(excess.sum()), 1.0)
        self._scale = 1.0

    def next_prices(self) -> Costs | None:
        if self._high is None:
            return None if self._scale > 1e12 else self._direction * self._unit * self._scale
        if np.allclose(self._low, self._high, rtol=1e-3):
            return None
        return (self._low + self._high) / 2

    def add(self, prices: Costs, priced: Solution) -> None:
        usage = self._model.usage(priced.chosen)
        self._bound = max(self._bound, priced.bound - float(prices @ self._limits))
        if (usage <= self._limits).all():
            self._high = prices
            self._consider(priced.chosen)
        else:
            self._low = prices
            over = np.maximum(usage - self._limits, 0)
            self._direction = self._direction + over / max(float(over.sum()), 1.0)
            self._direction /= self._direction.sum()
            if self._high is None:
                self._scale *= 8
        if self.best is not None:
            self.best = self.best._replace(bound=min(self._bound, self.best.cost))

    def _consider(self, chosen: Assignment) -> None:
        repaired = _use_up(self._model, self._limits, chosen)
        cost = self._model.cost(repaired)
        if self.best is None or cost < self.best.cost:
            self.best = Solution(repaired, cost, min(self._bound, cost), "priced memory")

    def add_exact(self, chosen: Assignment | None, bound: float) -> None:
        if math.isfinite(bound):
            self._bound = max(self._bound, bound if self.best is None else min(bound, self.best.cost))
        if chosen is not None and (self._model.usage(chosen) <= self._limits * (1 + 1e-9)).all():
            cost = self._model.cost(chosen)
            if self.best is None or cost <= self.best.cost:
                self.best = Solution(chosen, cost, min(self._bound, cost), "linear program with memory")
        if self.best is not None:
            self.best = self.best._replace(bound=min(self._bound, self.best.cost))

    def add_smallest(self, chosen: Assignment) -> None:
        """Consider the assignment that takes the least."""
        if (self._model.usage(chosen) <= self._limits).all():
            self._consider(chosen)

    def possible(self) -> list[list[int]]:
        """The choices that an assignment within the limits, no dearer than the best one, may have: its cost with prices
        is at most that of the best one and of the limits."""
        if self.best is None:
            return [list(range(len(costs))) for costs in self._model.unary]
        prices = self._high if self._high is not None else self._low
        cutoff = self.best.cost + float(prices @ self._limits)
        found = approximate(self._model.priced(prices), cutoff=cutoff)
        return [sorted({*own, choice}) for own, choice in zip(found.possible, self.best.chosen, strict=True)]

    def describe(self) -> str:
        if self.best is None:
            return "no plan within memory yet"
        return f"{self.best.cost * 1e3:.3f} ms, gap {self.best.gap:.2%}"


def _only_memory(model: PairwiseModel, limits: Costs) -> PairwiseModel:
    """The model whose cost is the memory that it takes, as a share of the limits."""
    unary = tuple([(own / limits[:, None]).sum(0) for own in model.memory])
    return PairwiseModel(unary, {pair: np.zeros_like(costs) for pair, costs in model.pairs.items()}, model.memory)


def _use_up(model: PairwiseModel, limits: Costs, chosen: Assignment) -> Assignment:
    """Change single choices that lower the cost and stay within the limits."""
    chosen = list(chosen)
    around: list[list[tuple[int, Costs]]] = [[] for _ in model.unary]
    for (i, j), costs in model.pairs.items():
        around[i].append((j, costs))
        around[j].append((i, costs.T))
    usage, changed = model.usage(chosen), True
    while changed:
        changed = False
        for variable, neighbours in enumerate(around):
            costs = model.unary[variable]
            for other, pair in neighbours:
                costs = costs + pair[:, chosen[other]]
            now = chosen[variable]
            after = usage[:, None] + model.memory[variable] - model.memory[variable][:, now : now + 1]
            allowed = np.where((after <= limits[:, None]).all(0), costs, np.inf)
            if allowed.min() < costs[now] - 1e-15:
                chosen[variable], changed = int(allowed.argmin()), True
                usage = after[:, chosen[variable]]
    return chosen


def _pairs(model: PairwiseModel) -> int:
    return sum([costs.size for costs in model.pairs.values()])
