"""Torch's optimizers on GT: five steps as in torch, and none that waits for a worker."""

import copy
import inspect

import pytest
import torch

import gt
from gt.client import session as sessions

torch.manual_seed(0)
MODEL = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
X = torch.randn(8, 4)
OPTIONS = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}, {"maximize": True}]
OPTIONS += [{"momentum": 0.9}, {"momentum": 0.9, "fused": True}, {"momentum": 0.9, "nesterov": True}]
OPTIONS += [{"weight_decay": 0.1}, {"weight_decay": 0.1, "fused": True}, {"centered": True}]
OPTIONS += [{"lr": torch.tensor(0.01)}, {"lr": torch.tensor(0.01), "fused": True}, {"amsgrad": True, "fused": True}]
# LBFGS and Adafactor read numbers in every step, by themselves; SparseAdam and Muon take other gradients.
NAMES = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def options_of(name):
    parameters = inspect.signature(getattr(torch.optim, name).__init__).parameters
    return [options for options in OPTIONS if parameters.keys() >= options.keys()]


def train(name, options, to, waits):
    """Parameters after five steps, and in `waits` how often the last step waited."""
    model, x = to(copy.deepcopy(MODEL)), to(X)
    optimizer = getattr(torch.optim, name)(model.parameters(), **copy.deepcopy(options))
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        before = len(waits)
        optimizer.step()
        last = len(waits) - before
    return [parameter.detach().cpu() for parameter in model.parameters()], last


@pytest.fixture
def waits(monkeypatch):
    """Notes each time that the client waits for a worker."""
    noted = []
    for name in ("read_query", "fetch"):
        method = getattr(sessions.Session, name)

        def noting(self, *args, method=method):
            noted.append(method)
            return method(self, *args)

        monkeypatch.setattr(sessions.Session, name, noting)
    return noted


def check(name, waits, to=gt.to):
    for options in options_of(name):
        expected, _ = train(name, options, lambda what: what, waits)
        found, waited = train(name, options, to, waits)
        assert waited == 0, options
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, o=options: f"{o}: {text}")


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_torchs_and_do_not_wait(anywhere, waits, name):
    check(name, waits)


@pytest.fixture
def two_workers():
    gt.init(workers=2, mode="virtual")
    yield
    gt.shutdown()


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD"])
def test_steps_of_cut_parameters_are_torchs(two_workers, waits, name):
    mesh = gt.mesh(2)

    def cut(what):
        moved = gt.to(what)
        if isinstance(moved, torch.nn.Module):
            for parameter in moved.parameters():
                parameter.data = gt.shard(parameter.data, mesh)
        return moved

    check(name, waits, cut)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS"])
def test_optimizers_that_read_numbers_equal_torchs(anywhere, name):
    def run(to):
        model, x = to(copy.deepcopy(MODEL)), to(X)
        optimizer = getattr(torch.optim, name)(model.parameters())

        def loss():
            optimizer.zero_grad()
            value = model(x).square().sum()
            value.backward()
            return value

        for _ in range(2):
            optimizer.step(loss)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    torch.testing.assert_close(run(gt.to), run(lambda what: what), rtol=1e-3, atol=1e-3)


def test_a_fused_step_of_lists_that_differ_raises_on_its_line(embedded):
    w, g = gt.ones(2), gt.ones(3)
    with pytest.raises(ValueError, match="_fused_sgd_.default: grads has shapes"):
        torch._fused_sgd_([w], [g], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
                          maximize=False, is_first_step=True)  # fmt: skip
