"""A choice problem: each variable takes one of its choices, and costs depend on single choices and on pairs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Costs: TypeAlias = NDArray[np.float64]
Assignment: TypeAlias = list[int]
"""The choice of each variable."""


@dataclass(frozen=True, eq=False)
class PairwiseModel:
    """Costs of the choices of numbered variables, all finite.

    - `unary`: per variable, the cost of each choice
    - `pairs`: the costs of two choices together, by a pair of variables, the lower number first
    - `memory`: per variable, (limits, choices): what each choice takes of each limited amount
    """

    unary: tuple[Costs, ...]
    pairs: Mapping[tuple[int, int], Costs]
    memory: tuple[Costs, ...]

    def cost(self, chosen: Sequence[int]) -> float:
        total = sum([float(costs[choice]) for costs, choice in zip(self.unary, chosen, strict=True)])
        return total + sum([float(costs[chosen[i], chosen[j]]) for (i, j), costs in self.pairs.items()])

    def usage(self, chosen: Sequence[int]) -> Costs:
        """What an assignment takes of each limited amount."""
        taken: Costs = sum(
            [own[:, choice] for own, choice in zip(self.memory, chosen, strict=True)], np.zeros(self.limits)
        )
        return taken

    @property
    def limits(self) -> int:
        return self.memory[0].shape[0] if self.memory else 0

    def priced(self, prices: Costs) -> PairwiseModel:
        """The model in which limited amounts have a price and no limit."""
        unary = [costs + prices @ own for costs, own in zip(self.unary, self.memory, strict=True)]
        return PairwiseModel(tuple(unary), self.pairs, self.memory)

    def restricted(self, kept: Sequence[Sequence[int]]) -> PairwiseModel:
        """The model with only some choices of each variable."""
        unary = tuple([costs[list(own)] for costs, own in zip(self.unary, kept, strict=True)])
        memory = tuple([taken[:, list(own)] for taken, own in zip(self.memory, kept, strict=True)])
        pairs = {(i, j): costs[np.ix_(kept[i], kept[j])] for (i, j), costs in self.pairs.items()}
        return PairwiseModel(unary, pairs, memory)


class ModelBuilder:
    """Builds a model variable by variable."""

    def __init__(self) -> None:
        self.unary: list[Costs] = []
        self.pairs: dict[tuple[int, int], Costs] = {}

    def variable(self, costs: Sequence[float] | Costs) -> int:
        self.unary.append(np.array(costs, dtype=float))
        return len(self.unary) - 1

    def add_costs(self, variable: int, costs: Costs) -> None:
        self.unary[variable] = self.unary[variable] + costs

    def add_pair(self, one: int, other: int, costs: Costs) -> None:
        """Add costs (choices of `one`, choices of `other`)."""
        if one == other:
            self.add_costs(one, np.diagonal(costs).copy())
            return
        if one > other:
            one, other, costs = other, one, costs.T
        existing = self.pairs.get((one, other))
        self.pairs[one, other] = costs if existing is None else existing + costs
