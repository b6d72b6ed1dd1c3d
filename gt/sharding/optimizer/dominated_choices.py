"""Finds choices that no best assignment needs: another choice of the same variable costs no more, whatever its
neighbours choose."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gt.sharding.optimizer.pairwise_model import Costs, PairwiseModel


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
        change = unary - unary[choice]  # at most, if another choice is taken instead
        for table in tables:
            change = change + (table - table[choice]).max(1)
        replaces = change < 0
        replaces[:choice] |= change[:choice] == 0
        needed[choice] = not replaces.any()
    return needed
