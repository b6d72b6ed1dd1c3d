"""Objects among the arguments whose content a call changes: the change is noticed, and the code goes on running."""

import random
import types
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch

import gt
from gt.client.compilation.object_state import ObjectState, digest


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0


class Plain:
    def __init__(self):
        self.value = 0


def set_value(each):
    each.value += 1


CHANGES = [
    (lambda: {1}, lambda each: (each.discard(1), each.add(2))),
    (lambda: np.zeros(2), lambda each: each.__iadd__(1)),
    (lambda: bytearray(b"a"), lambda each: each.__setitem__(0, 1)),
    (lambda: iter([1, 2, 3]), next),
    (lambda: random.Random(1), lambda each: each.random()),
    (lambda: np.random.default_rng(1), lambda each: each.random()),
    (lambda: torch.Generator().manual_seed(1), lambda each: torch.rand(2, generator=each)),
    (UserDict, lambda each: each.update(n=1)),
    (lambda: types.SimpleNamespace(value=0), set_value),
    (Slotted, set_value),
    (Plain, set_value),
    (Plain, lambda each: setattr(each, "new", 1)),
]


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_a_change_is_noticed(make, change):
    value = make()
    state = ObjectState(value)
    assert not state.is_changed() and not state.is_unknown()
    change(value)
    assert state.is_changed()


def test_a_generator_is_unknown():
    assert ObjectState(each for each in [1]).is_unknown()


def test_the_values_of_tensors_and_modules_are_not_read():
    module = torch.nn.Linear(2, 2)
    before = digest({"module": module, "tensor": module.weight})
    module.weight.data.add_(1)
    assert digest({"module": module, "tensor": module.weight}) == before


def test_a_generator_among_the_arguments_goes_on_in_every_call():
    gt.init()
    compiled = gt.compile(lambda x, numbers: (next(numbers), x * 2)[1])
    numbers = iter(list(range(100)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(16):
            compiled(gt.ones(2), numbers)
    assert next(numbers) == 16 and compiled.skipped == 0
    gt.shutdown()


def test_an_array_that_is_changed_between_calls_is_read_anew():
    gt.init()
    compiled = gt.compile(lambda x, array: x * torch.as_tensor(array))
    array = np.ones(2, dtype=np.float32)
    for _ in range(6):
        assert compiled(gt.ones(2), array).tolist() == [1, 1]
    array += 1
    assert compiled(gt.ones(2), array).tolist() == [2, 2] and compiled.skipped
    gt.shutdown()
