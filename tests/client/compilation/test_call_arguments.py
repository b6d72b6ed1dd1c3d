"""gt.compile: the arguments of a call, and the key under which its recordings are found."""

import numpy as np
import pytest
import torch

import gt
from gt.client import active_session
from gt.client.compilation.call_arguments import CallArguments, sharing_pattern, unique_tensors
from gt.client.compilation.traced_floats import FloatTrace, TracedFloat


@pytest.fixture(autouse=True)
def one_worker():
    gt.init()
    yield
    gt.shutdown()


def arguments(*args, **kwargs):
    return CallArguments(active_session.current(), args, kwargs)


def key(*args, **kwargs):
    return arguments(*args, **kwargs).key


def marked(tensor):
    tensor.mark = "a mark"
    return tensor


def hooked(tensor):
    tensor.register_hook(lambda gradient: gradient)
    return tensor


SAME = {
    "values of tensors": lambda: ((gt.ones(2),), (gt.zeros(2),)),
    "values of floats": lambda: ((0.5,), (0.25,)),
    "a plain tensor and one on GT": lambda: ((torch.ones(2),), (gt.ones(2),)),
    "equal texts and whole numbers": lambda: (("mean", 3), ("".join(["me", "an"]), 3)),
    "equal structures": lambda: (({"a": [gt.ones(1)]},), ({"a": [gt.zeros(1)]},)),
}
OTHER = {
    "shapes": lambda: ((gt.ones(2),), (gt.ones(3),)),
    "dtypes": lambda: ((gt.ones(2),), (gt.ones(2, dtype=torch.float64),)),
    "strides": lambda: ((gt.ones(2, 3),), (gt.ones(3, 2).t(),)),
    "gradients": lambda: ((gt.ones(2),), (gt.ones(2).requires_grad_(),)),
    "leaves and results": lambda: ((gt.ones(2).requires_grad_(),), (gt.ones(2).requires_grad_() * 1,)),
    "attributes of tensors": lambda: ((gt.ones(2),), (marked(gt.ones(2)),)),
    "hooks of tensors": lambda: ((gt.ones(2).requires_grad_(),), (hooked(gt.ones(2).requires_grad_()),)),
    "whole numbers": lambda: ((3,), (4,)),
    "a number and a truth value": lambda: ((1,), (True,)),
    "a number and a float": lambda: ((1,), (1.0,)),
    "structures": lambda: (([gt.ones(1)],), ((gt.ones(1),),)),
    "objects": lambda: ((object(),), (object(),)),
}


@pytest.mark.parametrize("name", SAME)
def test_calls_that_may_repeat_the_same_recording(name):
    first, second = SAME[name]()
    assert key(*first) == key(*second)


@pytest.mark.parametrize("name", OTHER)
def test_calls_that_need_recordings_of_their_own(name):
    first, second = OTHER[name]()
    assert key(*first) != key(*second)


def test_names_of_arguments_are_part_of_the_key():
    assert key(x=2) == key(x=2) != key(y=2)
    assert key(2) != key(x=2)


def test_tensors_that_are_tied_have_another_key():
    x, y = gt.ones(4), gt.ones(4)
    assert key(x, x) != key(x, y)
    assert key(x[:2], x[2:]) != key(x[:2], y[2:])


def test_settings_of_torch_are_part_of_the_key():
    x = gt.ones(2)
    before = key(x)
    with torch.no_grad():
        assert key(x) != before
    assert key(x) == before


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: np.zeros(2), lambda array: array.fill(1)),
        (lambda: {1, 2}, lambda values: values.add(3)),
        (lambda: bytearray(b"ab"), lambda text: text.extend(b"c")),
    ],
    ids=["array", "set", "bytearray"],
)
def test_a_container_of_plain_values_is_compared_by_content(make, change):
    content = make()
    before = key(content)
    assert key(content) == before
    change(content)
    assert key(content) != before


def test_plain_tensors_are_moved_once_each():
    x, y = torch.tensor([1.0, 2.0]), gt.ones(2)
    call = arguments(x, [x, y], third=x)
    first, (second, other) = call.args
    assert first is second is call.kwargs["third"]
    assert isinstance(first, gt.Tensor) and first.tolist() == [1.0, 2.0]
    assert other is y
    assert [(original is x, moved is first) for original, moved in call.moved] == [(True, True)]


def test_the_callers_tensors_are_found_again():
    x, y = torch.ones(2), gt.ones(2)
    call = arguments(x, y)
    assert call.original_args[0] is x
    assert call.original_tensor(call.args[0]) is x
    assert call.original_tensor(y) is y


def test_arguments_of_gt_are_passed_on_as_they_are():
    given = [gt.ones(1), 0.5]
    call = arguments(given, name="a")
    assert call.args[0] is given
    assert not call.moved


def test_floats_are_traced_and_other_arguments_are_not():
    x = gt.ones(1)
    call = arguments(x, [0.5, 3], rate=0.25)
    assert call.floats == [0.5, 0.25]
    (tensor, (first, whole)), named = call.traced(FloatTrace(call.floats))
    assert tensor is x
    assert [type(value) for value in (first, whole, named["rate"])] == [TracedFloat, int, TracedFloat]
    assert (first, named["rate"]) == (0.5, 0.25)


def test_objects_are_listed_for_the_walk_over_the_state():
    model = torch.nn.Linear(1, 1)
    call = arguments(model, gt.ones(1), 0.5, "text")
    assert call.objects == [("an argument of type Linear", model)]


def test_the_pattern_of_shared_objects():
    assert sharing_pattern([7, 8, 7, 9]) == (0, 1, 0, 3)
    x, y = gt.ones(1), gt.ones(1)
    assert [tensor is other for tensor, other in zip(unique_tensors([x, y, x]), [x, y], strict=True)] == [True, True]
