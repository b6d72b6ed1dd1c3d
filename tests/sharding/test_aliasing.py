"""Views and in-place writes of sharded tensors: aliases have the values of torch, and writes keep layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import gt
from tests.sharding.alias_programs import (
    READS,
    REPLICATED,
    SHAPES,
    VIEWS,
    WRITES,
    Distribute,
    Layout,
    distribute_as,
    identity,
    layouts,
    numbers,
    same,
    steps_of,
)

CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def several(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=CHECKS)


@several(120)
@given(
    shape=st.sampled_from(SHAPES),
    layout=layouts,
    program=st.lists(steps_of(list(VIEWS), list(WRITES)), min_size=1, max_size=8),
)
def test_aliases_agree_after_every_step(eight_workers, shape, layout, program):
    plain, ours = [numbers(shape)], [distribute_as(layout)(numbers(shape))]
    for done, step in enumerate(program):
        before = ours[0].spec
        step.apply(plain, identity)
        step.apply(ours, distribute_as(step.other))
        told = [(s.kind, s.name, s.which, s.n) for s in program[: done + 1]]
        for mine, theirs in zip(ours, plain, strict=True):
            same(mine, theirs, told)
        # a partial tensor that some read or write reduced stays as that left it
        assert ours[0].spec is before or before.partial, told
        assert ours[0].spec.mesh is before.mesh, told


@several(60)
@given(
    shape=st.sampled_from(SHAPES),
    layout=layouts,
    views=st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 4)), max_size=3),
    write=st.sampled_from(sorted(WRITES)),
    read=st.sampled_from(sorted(READS)),
    n=st.integers(0, 4),
)
def test_reads_through_views_see_writes(eight_workers, shape, layout, views, write, read, n):
    def run(x: Any, distribute: Distribute) -> list[Any]:
        view = x
        for name, m in views:
            view = VIEWS[name](view, m)
        early = READS[read](view, n)
        WRITES[write](x, n, distribute)
        return [early, READS[read](view, n), view]

    distribute = distribute_as(layout)
    for mine, theirs in zip(run(distribute(numbers(shape)), distribute), run(numbers(shape), identity), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)


WRITTEN = ["-, -", "x, -", "-, x", "-, - + x"]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("spec", WRITTEN)
def test_one_op_writes_two_views_of_one_tensor(eight_workers, spec, known):
    """Also where the op is known already from views of two tensors."""

    def run(distribute: Callable[[torch.Tensor, str], Any], x: torch.Tensor) -> list[Any]:
        one, other = [distribute(torch.zeros(2, 6), spec) for _ in range(2)]
        running, apart = [distribute(torch.zeros(2, 4), spec) for _ in range(2)]
        x = distribute(x, "x, -")
        if known:
            torch.aminmax(x * 2, dim=1, out=(one[0], other[1]))
            torch.nn.functional.batch_norm(x * 2, running[0], apart[1], training=True)
        torch.aminmax(x, dim=1, out=(one[0], one[1]))
        torch.nn.functional.batch_norm(x, running[0], running[1], training=True)
        return [one, other, running, apart]

    mesh, x = gt.mesh((2,), ["x"]), torch.randn(6, 4)
    ours = run(lambda tensor, layout: gt.distribute(tensor, mesh, layout), x)
    for mine, theirs in zip(ours, run(lambda tensor, _: tensor.clone(), x), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("spec", WRITTEN)
def test_views_that_overlap_are_refused_as_in_torch(eight_workers, spec, known):
    mesh = gt.mesh((2,), ["x"])
    one, other = [gt.distribute(numbers((6, 4)), mesh, spec) for _ in range(2)]
    if known:
        one[1:].add_(other[:-1])
    with pytest.raises(RuntimeError, match="single memory location"):
        one[1:].add_(one[:-1]).cpu()


# Torch refuses writes to views of functions that give several, and those of what was saved are checked elsewhere.
GRADUAL_VIEWS = [name for name in VIEWS if name not in ("split", "unbind", "detach")]
GRADUAL_WRITES = [
    "add_", "add_ tensor", "add_ row", "sub_ itself", "mul_", "fill_", "zero_", "copy_", "x[0] =", "x[-1] = row",
    "x[..., 1:] = ", "x[rows] =", "masked_fill_", "index_put_", "x += x.sum()", "flip",
]  # fmt: skip


@several(60)
@given(
    shape=st.sampled_from([shape for shape in SHAPES if math.prod(shape)]),
    layout=layouts,
    program=st.lists(steps_of(GRADUAL_VIEWS, GRADUAL_WRITES), min_size=1, max_size=5),
)
def test_gradients_through_writes_to_views(eight_workers, shape, layout, program):
    def run(distribute: Callable[[Layout], Distribute]) -> list[Any]:
        leaf = distribute(layout)(numbers(shape)).requires_grad_()
        pool = [leaf * 1.5]
        for step in program:
            step.apply(pool, distribute(step.other))
        loss = sum((alias * alias).sum() * (place_of + 1) for place_of, alias in enumerate(pool))
        (gradient,) = torch.autograd.grad(loss, leaf)
        return [loss, gradient, *pool]

    for mine, theirs in zip(run(distribute_as), run(lambda _: identity), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


OPTIMIZERS = {
    "sgd": lambda parameters, **how: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, **how),
    "nesterov": lambda parameters, **how: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, **how),
    "adamw": lambda parameters, **how: torch.optim.AdamW(parameters, lr=0.05, **how),
    "amsgrad": lambda parameters, **how: torch.optim.Adam(parameters, lr=0.05, amsgrad=True, **how),
}
PARAMETERS = [
    [Layout((2,), (0,)), Layout((2,), (0,))],
    [Layout((3,), (1,)), Layout((3,), (REPLICATED,))],
    [Layout((2, 2), (0, 1)), Layout((2, 2), (REPLICATED, 0))],
    [Layout((2, 2), (1, 1)), Layout((3,), (0,), ragged=True)],
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_optimizers_step_as_in_torch(eight_workers, name, foreach, parameters):
    values = [torch.randn(5, 7), torch.randn(7)]
    batch = torch.randn(3, 5)

    def run(weights: Sequence[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        optimizer = OPTIMIZERS[name](weights, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            ((x @ weights[0] + weights[1]) ** 2).mean().backward()
            optimizer.step()
        states = [optimizer.state[w][key] for w in weights for key in sorted(optimizer.state[w])]
        return [*weights, *states]

    ours = [distribute_as(layout)(value).requires_grad_() for layout, value in zip(parameters, values, strict=True)]
    specs = [weight.spec for weight in ours]
    found = run(ours, distribute_as(parameters[0])(batch))
    for mine, theirs in zip(found, run([value.clone().requires_grad_() for value in values], batch), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
    assert [weight.spec for weight in ours] == specs


@pytest.mark.parametrize("other", ["-, -", "a, -", "-, b a", "a b, -", "b, a", "-, - + b"])
@pytest.mark.parametrize("layout", ["-, -", "a, -", "-, a b", "b, a", "-, - + a"])
def test_comparisons_written_into_numbers(eight_workers, layout, other):
    """Computed as truth values, and kept as numbers."""
    mesh = gt.mesh((2, 2), ("a", "b"))
    for name in ("eq_", "lt_", "logical_and_", "ne_"):
        for view in (lambda t: t, lambda t: t.t(), lambda t: t[1:4], lambda t: t[:, 2]):
            x, y = torch.randint(0, 3, (5, 6)).float(), torch.randint(0, 3, (5, 6)).float()
            ours, theirs = gt.distribute(x, mesh, layout), gt.distribute(y, mesh, other)
            getattr(view(ours), name)(view(theirs))
            getattr(view(x), name)(view(y))
            assert torch.equal(ours.cpu(), x), name


VIEWS_OF_PARTS = {
    "rows": lambda t: t[1:],
    "no rows": lambda t: t[:0],
    "every other row": lambda t: t[::2],
    "transposed": lambda t: t.t(),
    "a column": lambda t: t[:, 0],
    "a column of all": lambda t: t.unbind(1)[-1],
    "a column that stays": lambda t: t.narrow(1, 0, 1),
    "the last columns": lambda t: t.split(2, 1)[-1],
    "one more dim": lambda t: t.unsqueeze(1),
    "flat": lambda t: t.view(-1),
    "a diagonal": lambda t: t.diagonal(),
}


@pytest.mark.parametrize("layout", ["a, b", "a b, -", "-, b a", "-, a", "b, -", "-, -"])
@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (3, 5)], ids=str)
def test_views_where_some_workers_have_nothing(eight_workers, shape, layout):
    for name, view in VIEWS_OF_PARTS.items():
        plain = torch.arange(15).float()[: shape[0] * shape[1]].reshape(shape)
        ours = gt.distribute(plain, gt.mesh((2, 2), ("a", "b")), layout)
        assert torch.equal((view(ours) + 1).cpu(), view(plain) + 1), name
        view(ours).mul_(2)
        view(plain).mul_(2)
        assert torch.equal(ours.cpu(), plain), name


@pytest.mark.parametrize("layout", ["-, x", "x, -", "-, -"])
def test_views_of_nothing(eight_workers, layout):
    parts = gt.distribute(torch.ones(1, 5), gt.mesh(2, ["x"]), layout)[1:].t().unbind()
    assert [part.cpu().shape for part in parts] == [(0,)] * 5
    parts[2].add_(1)
    assert parts[2].sum().item() == 0
