"""gt.compile: a function that changes its arguments changes those of the caller in every call."""

import warnings
from collections import deque

import pytest
import torch

import gt
from gt.client.compilation.specialization import MAX_ATTEMPTS

CALLS = MAX_ATTEMPTS + 4


@pytest.fixture(autouse=True)
def one_worker():
    gt.init()
    yield
    gt.shutdown()


def put(batch):
    batch["y"] = batch["x"] * 2
    return batch["y"]


def put_and_return(batch, rate):
    batch["y"] = batch["x"] * rate
    return batch


def delete(batch):
    return batch.pop("x") * 2


def append(x, log):
    log.append(1.0)
    return x * 2


def append_inside(batch):
    batch["log"].append(batch["rate"])
    return batch["x"] * batch["rate"]


def write(x, total):
    total.add_(1)
    return x * total


def write_and_return(x, total):
    return total.add_(x.detach().sum() * 0 + 1)


def require_grad(x):
    x.requires_grad_()
    return x.detach() * 2


def tag(x):
    x.tag = "seen"
    return x * 2


def hook(x):
    x.requires_grad_()
    x.register_hook(lambda gradient: gradient * 2)
    return x.detach() * 2


def retain(x):
    y = x.requires_grad_() * 1
    y.retain_grad()
    y.sum().backward()
    return y.grad


def detach_in_place(x):
    x.detach_()
    return x * 2


def write_with_graph(x):
    x.mul_(3)
    return x.detach() * 2


def ones():
    return gt.ones(2)


def with_graph():
    return gt.ones(2).requires_grad_() * 1


CASES = {
    "put": (put, lambda: [{"x": ones()}]),
    "put into a dict with a plain tensor": (put, lambda: [{"x": torch.ones(2)}]),
    "put and return": (put_and_return, lambda: [{"x": ones()}, 0.5]),
    "delete": (delete, lambda: [{"x": ones()}]),
    "append": (append, lambda: [ones(), []]),
    "append to a deque": (append, lambda: [torch.ones(2), deque([2.0])]),
    "append inside": (append_inside, lambda: [{"x": ones(), "log": [], "rate": 0.5}]),
    "write to a plain tensor": (write, lambda: [ones(), torch.zeros(2)]),
    "write to a plain tensor and return it": (write_and_return, lambda: [ones(), torch.zeros(2)]),
    "require a gradient": (require_grad, lambda: [ones()]),
    "set an attribute": (tag, lambda: [ones()]),
    "set an attribute of a plain tensor": (tag, lambda: [torch.ones(2)]),
    "register a hook": (hook, lambda: [ones()]),
    "detach": (detach_in_place, lambda: [with_graph()]),
    "write with a graph": (write_with_graph, lambda: [with_graph()]),
}


def described(value):
    """Everything of a value that a function can change."""
    if isinstance(value, torch.Tensor):
        hooks = len(value._backward_hooks or ())
        flags = (value.requires_grad, value.is_leaf, hooks, isinstance(value, gt.Tensor))
        return value.tolist(), *flags, getattr(value, "tag", None)
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return [described(item) for item in value] if isinstance(value, list | deque) else value


@pytest.mark.parametrize(("function", "make"), CASES.values(), ids=CASES)
def test_the_callers_arguments_are_changed_in_every_call(function, make):
    expected = make()
    function(*expected)
    compiled = gt.compile(function)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(CALLS):
            arguments = make()
            compiled(*arguments)
            assert described(arguments) == _moved(described(expected), described(arguments))
    assert compiled.skipped == 0 and len(seen) == 1


def _moved(expected, found):
    """Results that were computed from plain tensors are on GT."""
    if isinstance(expected, tuple) and not expected[4]:
        return (*expected[:4], found[4], expected[5])
    if isinstance(expected, dict):
        return {key: _moved(item, found[key]) for key, item in expected.items()}
    return [_moved(*pair) for pair in zip(expected, found, strict=True)] if isinstance(expected, list) else expected


def test_a_warning_names_the_argument():
    compiled = gt.compile(append)
    for _ in range(MAX_ATTEMPTS - 1):
        compiled(gt.ones(2), [])
    with pytest.warns(RuntimeWarning, match="it changes the argument 'log'"):
        compiled(gt.ones(2), [])


@pytest.mark.parametrize("plain", [False, True])
def test_a_returned_argument_is_the_callers_own(plain):
    compiled = gt.compile(lambda batch, rate: (batch, batch["x"], batch["x"] * rate))
    for number in range(9):
        batch = {"x": torch.ones(2) if plain else gt.ones(2), "others": [3]}
        same, x, scaled = compiled(batch, float(number))
        assert same is batch and x is batch["x"] and scaled.tolist() == [number] * 2
    assert compiled.skipped >= 3


def test_a_list_that_is_passed_twice_is_not_taken_for_two_lists():
    compiled = gt.compile(lambda x, first, second: (x * 2, second))
    for number in range(12):
        first = [1]
        second = first if number < 6 else [1]
        assert compiled(gt.ones(2), first, second)[1] is second


def test_a_tensor_that_is_passed_twice_is_not_taken_for_two_tensors():
    compiled = gt.compile(lambda x, y: (x * 2, y))
    for number in range(12):
        x = gt.ones(2)
        y = x if number < 6 else x.detach()
        assert compiled(x, y)[1] is y


def test_changes_before_an_error_are_kept():
    def fail(batch, rate):
        batch["seen"] = True
        raise ValueError(rate)

    batch = {"x": gt.ones(2)}
    with pytest.raises(ValueError, match=r"0\.5"):
        gt.compile(fail)(batch, 0.5)
    assert batch["seen"]


def test_a_write_to_one_of_two_plain_tensors_that_share_memory_is_refused():
    memory = torch.zeros(4)
    with pytest.raises(gt.CompileError, match="shares memory"):
        gt.compile(write)(memory[:2], memory[1:3])


def test_plain_tensors_that_share_memory_are_read():
    tokens = torch.arange(4.0)
    compiled = gt.compile(lambda x, y: (x * y).sum())
    assert {compiled(tokens[:-1], tokens[1:]).item() for _ in range(8)} == {8.0} and compiled.skipped


def test_a_gradient_of_a_plain_argument_is_a_read_and_refused():
    def backward(x):
        (x * 3).sum().backward()

    with pytest.raises(gt.CompileError, match="reads a value"):
        gt.compile(backward)(torch.ones(2, requires_grad=True))
