"""gt.compile: recordings for an object go with the object."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import gt
from gt.client.compilation.specialization_table import MAX_SPECIALIZATIONS


@pytest.fixture(autouse=True)
def one_worker():
    gt.init()
    yield
    gt.shutdown()


class Trainer:
    def __init__(self):
        self.model = gt.to(torch.nn.Linear(30, 30))
        self.loss = lambda x: self.model(x).sum()  # refers to its trainer

    @gt.compile
    def step(self, x):
        return self.loss(x).detach()


@gt.compile
def step(model, x):
    return model(x).detach()


def train():
    trainer = Trainer()
    for _ in range(6):
        trainer.step(gt.ones(2, 30))
    return weakref.ref(trainer)


def train_module():
    model = gt.to(torch.nn.Linear(30, 30))
    for _ in range(6):
        step(model, gt.ones(2, 30))
    return weakref.ref(model)


@pytest.mark.parametrize(("make", "compiled"), [(train, Trainer.step), (train_module, step)])
def test_recordings_keep_no_object_and_no_memory(make, compiled):
    gc.collect()
    gt.synchronize()
    before, skipped = gt.debug.get_worker_stats()[0].bytes, compiled.skipped
    count = MAX_SPECIALIZATIONS + 8
    found = [make() for _ in range(count)]
    gc.collect()
    gt.synchronize()
    assert [each() for each in found] == [None] * count
    assert gt.debug.get_worker_stats()[0].bytes - before < 3 * 4 * 930
    assert compiled.skipped - skipped == count and not compiled.reasons


def test_copies_have_no_recordings():
    model = gt.to(torch.nn.Linear(30, 30))
    expected = [step(model, gt.ones(2, 30)).tolist() for _ in range(6)][-1]
    for copied in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert step(copied, gt.ones(2, 30)).tolist() == expected
    assert list(model.state_dict()) == ["weight", "bias"]


def test_recordings_of_objects_end_with_the_session():
    trainer = Trainer()
    for _ in range(6):
        trainer.step(gt.ones(2, 30))
    gt.shutdown()
    gt.init()
    trainer = Trainer()
    assert all(trainer.step(gt.ones(2, 30)).numel() == 1 for _ in range(6))
