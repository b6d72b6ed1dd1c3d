"""The solvers of choice problems, compared with trying all assignments."""

import itertools
import math

import numpy as np
import pytest

from gt.core.errors import SettingsError
from gt.sharding.solver.graph_reduction import ReducedModel, undominated_choices
from gt.sharding.solver.linear_program import solve_exactly
from gt.sharding.solver.message_passing import _MessagePassing, approximate
from gt.sharding.solver.pairwise_model import ModelBuilder, PairwiseModel
from gt.sharding.solver.simple_solver import SimpleSolver
from gt.sharding.solver.strategy_graph import MergedModel


def random_model(seed, variables=6, choices=4, share=0.6, limits=2):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, choices + 1, variables)
    builder = ModelBuilder()
    for size in sizes:
        builder.variable(rng.random(size))
    for i in range(variables):
        for j in range(i):
            if rng.random() < share:
                builder.add_pair(i, j, rng.random((sizes[i], sizes[j])))
    memory = tuple([rng.random((limits, size)) for size in sizes])
    return PairwiseModel(tuple(builder.unary), builder.pairs, memory)


def brute_force(model, limits=()):
    """The best assignment, found by trying all."""
    best, cost = None, math.inf
    for chosen in itertools.product(*[range(len(costs)) for costs in model.unary]):
        own = model.cost(chosen)
        if own < cost and all(model.usage(chosen)[: len(limits)] <= np.array(limits)):
            best, cost = list(chosen), own
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_exact_answer_is_that_of_trying_all(seed):
    model = random_model(seed)
    found = SimpleSolver("exact").solve(model)
    assert found.cost == pytest.approx(model.cost(brute_force(model)))
    assert found.gap < 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_limits_are_kept_and_the_exact_answer_is_the_best_within_them(seed):
    model, limits = random_model(seed), (2.6, 2.6)
    best = brute_force(model, limits)
    found = SimpleSolver("exact").solve(model, limits)
    if best is None:
        assert found is None
    else:
        assert (model.usage(found.chosen) <= np.array(limits) + 1e-9).all()
        assert found.cost == pytest.approx(model.cost(best))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("limits", [(), (2.8, 2.8)])
def test_no_assignment_costs_less_than_the_bound_of_a_fast_answer(seed, limits):
    model = random_model(seed)
    best, found = brute_force(model, limits), SimpleSolver("fast").solve(model, limits)
    if best is not None and found is not None:
        assert found.bound <= model.cost(best) + 1e-9 <= found.cost + 2e-9


@pytest.mark.parametrize("seed", range(8))
def test_messages_never_bound_more_than_the_best_cost_and_keep_the_best_choices(seed):
    model = random_model(seed, share=0.9)
    best, passing = brute_force(model), _MessagePassing(model)
    bounds = []
    for _ in range(20):
        passing.sweep()
        bounds.append(passing.bound)
        possible = passing.possible(model.cost(best))
        assert all(choice in own for choice, own in zip(best, possible, strict=True))
    assert bounds == sorted(bounds) and bounds[-1] <= model.cost(best) + 1e-9
    assert bounds[-1] >= 0.8 * model.cost(best)


@pytest.mark.parametrize("seed", range(6))
def test_choices_that_message_passing_excludes_are_in_no_better_assignment(seed):
    model = random_model(seed)
    found, best = approximate(model), brute_force(model)
    assert found.cost <= model.cost(best) * 1.5
    if model.cost(best) < found.cost:
        assert all(choice in possible for choice, possible in zip(best, found.possible, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_elimination_keeps_the_best_cost(seed):
    model = random_model(seed, share=0.35)
    reduced = ReducedModel(model)
    core = brute_force(reduced.core) if reduced.core.unary else []
    assert model.cost(reduced.complete(core)) == pytest.approx(model.cost(brute_force(model)))


@pytest.mark.parametrize("seed", range(8))
def test_without_dominated_choices_the_best_cost_is_the_same(seed):
    model = random_model(seed, variables=7, choices=6, share=0.4)
    model = PairwiseModel(model.unary, {pair: 0.2 * costs for pair, costs in model.pairs.items()}, model.memory)
    kept = undominated_choices(model)
    assert all(kept) and sum(map(len, kept)) < sum(map(len, model.unary))
    small = model.restricted(kept)
    assert small.cost(brute_force(small)) == pytest.approx(model.cost(brute_force(model)))


def test_of_equal_choices_one_is_kept():
    builder = ModelBuilder()
    for _ in range(2):
        builder.variable([1.0, 1.0, 1.0])
    builder.add_pair(0, 1, np.zeros((3, 3)))
    model = PairwiseModel(tuple(builder.unary), builder.pairs, tuple([np.zeros((0, 3))] * 2))
    assert undominated_choices(model) == [[0], [0]]


def test_a_chain_is_eliminated_completely():
    builder = ModelBuilder()
    for number in range(50):
        builder.variable([0.0, number % 3])
    for number in range(49):
        builder.add_pair(number, number + 1, np.array([[0.0, 2.0], [2.0, 0.0]]))
    model = PairwiseModel(tuple(builder.unary), builder.pairs, tuple([np.zeros((0, 2))] * 50))
    assert not ReducedModel(model).variables
    assert SimpleSolver().solve(model).chosen == [0] * 50


def test_a_fractional_relaxation_is_branched_on():
    """Three variables that all want to differ: the relaxation gives each of them one half of both choices."""
    builder = ModelBuilder()
    for _ in range(3):
        builder.variable([0.0, 0.0])
    for i in range(3):
        for j in range(i):
            builder.add_pair(j, i, np.eye(2))
    model = PairwiseModel(tuple(builder.unary), builder.pairs, tuple([np.zeros((0, 2))] * 3))
    answer = solve_exactly(model, (), 10)
    assert not answer.is_integral and model.cost(answer.chosen) == 1
    assert answer.bound == pytest.approx(1)


def test_merged_variables_take_the_same_choice_and_the_cost_stays():
    model = random_model(3, variables=4)
    twice = PairwiseModel(
        (*model.unary, *model.unary),
        {**model.pairs, **{(i + 4, j + 4): costs for (i, j), costs in model.pairs.items()}},
        (*model.memory, *model.memory),
    )
    merged = MergedModel(twice, [0, 1, 2, 3, 0, 1, 2, 3])
    found = SimpleSolver().solve(merged.model)
    chosen = merged.complete(found.chosen)
    assert chosen[:4] == chosen[4:]
    assert twice.cost(chosen) == pytest.approx(found.cost) == pytest.approx(2 * model.cost(brute_force(model)))


def test_an_unknown_method_is_refused():
    with pytest.raises(SettingsError, match="one of auto, exact, fast"):
        SimpleSolver("exakt")
