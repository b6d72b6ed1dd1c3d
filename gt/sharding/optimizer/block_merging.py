"""Repeated blocks, such as the layers of a model, found by their structure and merged: variables that look the same
with all their surroundings take the same choice. So a problem does not grow with the number of layers."""

from __future__ import annotations

from collections.abc import Sequence

from gt.sharding.optimizer.pairwise_model import Assignment, ModelBuilder, PairwiseModel
from gt.sharding.optimizer.strategy_graph import StrategyGraph

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
