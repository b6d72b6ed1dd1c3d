"""gt.compile: results of recorded and skipped calls are the objects that the function would return."""

import warnings

import pytest

import gt
from gt.client.compilation.specialization import MAX_ATTEMPTS


@pytest.fixture(autouse=True)
def one_worker():
    gt.init()
    yield
    gt.shutdown()


def test_an_object_that_is_returned_twice_stays_one():
    @gt.compile
    def compiled(x):
        y = x * 2
        return y, {"y": y}, x, [x]

    for _ in range(8):
        x = gt.ones(2)
        y, others, same, again = compiled(x)
        assert y is others["y"] and same is x and again[0] is x and y.tolist() == [2, 2]
    assert compiled.skipped == 3


def test_a_returned_gradient_is_the_gradient():
    weight = gt.ones(2).requires_grad_()

    def backward(x):
        weight.grad = None
        (weight * x).sum().backward()
        return weight.grad, weight

    compiled = gt.compile(backward)
    for number in range(8):
        gradient, same = compiled(gt.ones(2) * number)
        assert gradient is weight.grad and same is weight and gradient.tolist() == [number] * 2
    assert compiled.skipped == 3


def test_a_returned_leaf_is_a_leaf():
    compiled = gt.compile(lambda x: (x * 2).detach().requires_grad_())
    for _ in range(8):
        found = compiled(gt.ones(2))
        (found * 3).sum().backward()
        assert found.is_leaf and found.grad.tolist() == [3, 3]
    assert compiled.skipped == 3


def tagged(x):
    y = x * 2
    y.tag = "one"
    return y


def doubled(x):
    y = [x * 2]
    return y, y


KEPT = []


def kept(x):
    return x * 2, KEPT


def with_gradient(x):
    leaf = x.detach().requires_grad_()
    leaf.sum().backward()
    return leaf


@pytest.mark.parametrize(
    ("function", "is_right"),
    [
        (tagged, lambda found: found.tag == "one"),
        (doubled, lambda found: found[0] is found[1]),
        (kept, lambda found: found[1] is KEPT),
        (with_gradient, lambda found: found.grad.tolist() == [1, 1]),
    ],
)
def test_results_that_a_skipped_call_could_not_give_are_given_by_the_code(function, is_right):
    compiled = gt.compile(function)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert all(is_right(compiled(gt.ones(2))) for _ in range(MAX_ATTEMPTS + 4))
    assert compiled.skipped == 0 and len(seen) == 1


def test_a_lazy_module_is_recorded_when_it_has_its_parameters():
    module = gt.nn.LazyLinear(2)
    compiled = gt.compile(lambda x: module(x).detach())
    found = [compiled(gt.ones(4, 3)).tolist() for _ in range(8)]
    assert found == [found[0]] * 8 and compiled.skipped == 2
