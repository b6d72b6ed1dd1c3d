"""The objects that a function uses besides its arguments: found, and compared."""

import torch

import gt
from gt.client.compilation.watched_state import WatchedState
from tests.client import layout_cases

RATE = 0.5
step = 0  # a global with the name of an attribute


def watch(function):
    return WatchedState([("function", function)])


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


def test_globals_are_watched_and_names_of_attributes_are_not(monkeypatch):
    watched = watch(lambda optimizer: optimizer.step(RATE))
    monkeypatch.setitem(globals(), "step", 1)
    assert watched.first_change() is None
    monkeypatch.setitem(globals(), "RATE", 0.25)
    assert watched.first_change() == "RATE"


def test_a_variable_of_another_file_of_the_program_is_watched_and_the_rest_of_the_file_is_not(monkeypatch):
    watched = watch(lambda: layout_cases.AXES)
    assert watched.unknown == ""
    monkeypatch.setattr(layout_cases, "of_another_program", 1, raising=False)
    assert watched.first_change() is None
    monkeypatch.setattr(layout_cases, "AXES", ())
    assert watched.first_change() == "layout_cases.AXES"


def test_equal_numbers_are_no_change_and_minus_zero_is_one(monkeypatch):
    monkeypatch.setitem(globals(), "RATE", 0.0)
    watched = watch(lambda: RATE)
    monkeypatch.setitem(globals(), "RATE", float("0.0"))
    assert watched.first_change() is None
    monkeypatch.setitem(globals(), "RATE", -0.0)
    assert watched.first_change() == "RATE"


class Trainer:
    def __init__(self):
        self.scale = 2.0
        self.calls = 0

    def step(self):
        return self.scaled(1.0)

    def scaled(self, value):
        return value * self.scale

    def run(self):
        self.calls += 1


def test_attributes_that_the_code_does_not_name_may_change():
    trainer = Trainer()
    watched = watch(trainer.step)
    trainer.run()
    assert watched.first_change() is None
    trainer.scale = 3.0
    assert watched.first_change().endswith(".scale")


def test_containers_that_grow_and_modules_that_change():
    values = [1, 2]
    model = torch.nn.Sequential(torch.nn.Dropout(0.5))
    watched = watch(lambda: (values, model))
    values.append(3)
    assert watched.first_change().startswith("values")
    watched = watch(lambda: (values, model))
    model[0].p = 0.25
    assert watched.first_change().endswith(".p")
    watched = watch(lambda: (values, model))
    model.append(torch.nn.ReLU())
    assert watched.first_change() is not None


def test_a_schedule_matters_if_it_is_read():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    reads, ignores = watch(lambda: schedule.get_last_lr()), watch(lambda: schedule)
    optimizer.step()
    schedule.step()
    assert reads.first_change() is not None
    assert ignores.first_change() is None
    assert ignores.change_in_call() is not None


class Descent(torch.optim.Optimizer):
    """An optimizer of the program."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    @property
    def rate(self):
        return self.param_groups[0]["lr"]

    def step(self):
        return self.rate

    @torch.no_grad()
    def decorated_step(self):
        return self.param_groups[0]["lr"]


def rate_of(optimizer):
    return optimizer.param_groups[0]["lr"]


# A class that is no optimizer, with a name that could be taken for that of one.
Misnamed = type("the optimizer class Descent", (), {"step": lambda self, optimizer: optimizer.param_groups[0]["lr"]})


def first_change_of_a_rate(use):
    optimizer = Descent([torch.zeros(1)])
    watched = watch(use(optimizer))
    assert watched.first_change() is None
    optimizer.param_groups[0]["lr"] = 0.5
    return watched.first_change()


def test_a_rate_that_only_methods_of_the_optimizer_read_may_change():
    assert first_change_of_a_rate(lambda optimizer: lambda: optimizer.step()) is None
    assert first_change_of_a_rate(lambda optimizer: lambda: optimizer.decorated_step()) is None


def test_a_rate_that_other_code_reads_is_watched_whatever_its_class_is_called():
    misnamed = Misnamed()
    assert first_change_of_a_rate(lambda optimizer: lambda: rate_of(optimizer)).endswith("['lr']")
    assert first_change_of_a_rate(lambda optimizer: lambda: misnamed.step(optimizer)).endswith("['lr']")
