"""The objects that a function uses besides its arguments: found, and compared."""

import functools
import types

import pytest
import torch

import gt
from gt.client.compilation.watched_state import WatchedState
from tests.client import layout_cases

RATE = 0.5


def watch(function, *touched, ignored=frozenset()):
    return WatchedState([("function", function)], touched, ignored)


def changed(watched):
    return [each.name for each in watched.changes()]


def test_tensors_of_closures_modules_containers_and_optimizers(embedded):
    model = gt.to(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(gt.ones(1, 2)).sum().backward()
    optimizer.step()
    others = {"a": [gt.ones(1)]}
    watched = watch(lambda: (model, optimizer, others))
    momenta = [entries["momentum_buffer"] for entries in optimizer.state.values()]
    expected = [*model.parameters(), *others["a"], *momenta]
    assert {id(tensor) for tensor in watched.tensors} == {id(tensor) for tensor in expected}
    assert watched.optimizers == [optimizer]


def test_touched_objects_are_looked_at_and_are_not_the_functions_own():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5))
    watched = watch(lambda: None, model)
    assert id(model) not in watched.own_ids
    model.eval()
    assert changed(watched) == ["a Sequential.training", "a Sequential.0.training"]


def test_globals_that_the_code_names_are_watched(monkeypatch):
    watched = watch(lambda: [RATE for _ in range(2)])
    assert changed(watched) == []
    monkeypatch.setitem(globals(), "RATE", 0.25)
    assert changed(watched) == ["RATE"]


def test_a_variable_of_another_file_is_watched_and_the_rest_of_the_file_is_not(monkeypatch):
    watched = watch(lambda: layout_cases.AXES)
    monkeypatch.setattr(layout_cases, "of_another_program", 1, raising=False)
    assert changed(watched) == []
    monkeypatch.setattr(layout_cases, "AXES", ())
    assert changed(watched) == ["layout_cases.AXES"]


def test_equal_numbers_are_no_change_and_minus_zero_is_one(monkeypatch):
    monkeypatch.setitem(globals(), "RATE", 0.0)
    watched = watch(lambda: RATE)
    monkeypatch.setitem(globals(), "RATE", float("0.0"))
    assert changed(watched) == []
    monkeypatch.setitem(globals(), "RATE", -0.0)
    assert changed(watched) == ["RATE"]


class Trainer:
    def __init__(self):
        self.scale = 2.0
        self.config = types.SimpleNamespace(rate=1.0)
        self.layers = {"first": torch.nn.Dropout(0.5)}

    def step(self):
        return self.scale


@pytest.mark.parametrize("wrap", [lambda step: step, functools.partial, lambda step: torch.no_grad()(step)])
def test_attributes_of_the_instance_are_watched_and_those_of_objects_in_it_are_not(wrap):
    trainer = Trainer()
    watched = watch(wrap(trainer.step))
    trainer.config.rate = 2.0
    assert changed(watched) == []
    trainer.scale = 3.0
    trainer.layers["first"].p = 0.25
    assert [name.rpartition(".")[2] for name in changed(watched)] == ["scale", "p"]
    trainer.config = None
    assert len(watched.changes()) == 3


def helper():
    return RATE


def test_variables_of_functions_that_the_code_names_are_watched(monkeypatch):
    watched = watch(lambda: helper())
    monkeypatch.setitem(globals(), "RATE", 0.25)
    assert changed(watched) == ["RATE"]


def test_containers_that_grow_and_modules_that_change():
    values = [1, 2]
    model = torch.nn.Sequential(torch.nn.Dropout(0.5))
    watched = watch(lambda: (values, model))
    values.append(3)
    assert changed(watched)[0] == "values"
    watched = watch(lambda: (values, model))
    model.append(torch.nn.ReLU())
    model.register_forward_hook(print)
    assert {"model", "model._forward_hooks"} <= set(changed(watched))


def test_values_that_are_ignored_are_not_watched_and_their_neighbours_are():
    trainer, values = Trainer(), [1]
    function = lambda: (trainer, values)
    watched = watch(function)
    trainer.scale = 3.0
    values.append(2)
    ignored = {each.place for each in watched.changes()}
    watched = watch(function, ignored=ignored)
    trainer.scale = 4.0
    values.append(3)
    assert changed(watched) == []
    trainer.config = None
    assert changed(watched) == ["trainer.config"]


def test_settings_of_an_optimizer_and_its_counts_may_change_and_its_parameters_may_not():
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    watched = watch(lambda: optimizer)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    assert changed(watched) == []
    optimizer.state.clear()
    assert "optimizer.state" in changed(watched)
