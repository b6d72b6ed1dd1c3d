"""`gt.auto_shard` on the programs that people write: each is planned, runs as predicted, and has torch's losses."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import gt
from gt.signals.config import Config
from gt.signals.registry import registry

# Slow workers and fast links, so that plans cut what they can.
MACHINE = gt.Calibration(flops=2e8, memory_bandwidth=1e8, op_seconds=1e-6, message_seconds=1e-7, link_bandwidth=1e9)


@pytest.fixture(autouse=True)
def clean():
    gt.shutdown()
    registry.clear()
    yield
    gt.shutdown()
    registry.clear()


def mlp(width=32):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def rows(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)


def trained_by(make_optimizer, loss=functional.mse_loss):
    """A step of an optimizer."""

    def make_step(model):
        optimizer = make_optimizer(model.parameters())

        def step(x, y):
            optimizer.zero_grad()
            found = loss(model(x), y)
            found.backward()
            optimizer.step()
            return found

        return step

    return make_step


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def accumulating(model):
    optimizer = sgd(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        total = 0
        for some, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = functional.mse_loss(model(some), wanted) / 4
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step


def with_closure(model):
    optimizer = sgd(model.parameters())

    def step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return step


def clipping(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return step


def averaging(model):
    optimizer, averages = sgd(model.parameters()), [parameter.detach().clone() for parameter in model.parameters()]

    def step(x, y):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        return loss

    return step


def evaluating(model):
    @torch.no_grad()
    def step(x, y):
        return functional.mse_loss(model(x), y)

    return step


def in_bfloat16(model):
    optimizer = sgd(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.second, hidden, use_reentrant=False)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(self.linear(x).relu())


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, given):
        return {"y": self.linear(given["x"]), "rest": (given["x"].sum(), [given["x"] * 2])}


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        given = self.inner({"x": x})
        return given["y"] + given["rest"][1][0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x)).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.head = kind(16, 32, batch_first=True), nn.Linear(32, 32)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1])


def convolutions():
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def bags():
    """The first sum of bags waits for its shape, and gathers the table."""
    return nn.Sequential(nn.EmbeddingBag(64, 32), nn.Linear(32, 7))


def half_frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


LABELS = torch.arange(32)
PROGRAMS = {
    "adam": (mlp, trained_by(lambda own: torch.optim.Adam(own, lr=1e-3, foreach=False)), rows(32, 32)),
    "fused adam": (mlp, trained_by(lambda own: torch.optim.Adam(own, lr=1e-3, fused=True)), rows(32, 32)),
    "fused sgd": (mlp, trained_by(lambda own: torch.optim.SGD(own, 0.1, momentum=0.9, fused=True)), rows(32, 32)),
    "muon": (lambda: nn.Linear(32, 64, bias=False), trained_by(torch.optim.Muon), (rows(16, 32)[0], rows(16, 64)[0])),
    "accumulation": (mlp, accumulating, rows(32, 32)),
    "closure": (mlp, with_closure, rows(32, 32)),
    "clipping": (mlp, clipping, rows(32, 32)),
    "averaging": (mlp, averaging, rows(32, 32)),
    "evaluation": (mlp, evaluating, rows(32, 32)),
    "bfloat16": (mlp, in_bfloat16, rows(32, 32)),
    "recomputed": (Recomputed, trained_by(sgd), rows(32, 32)),
    "called twice": (Twice, trained_by(sgd), rows(32, 32)),
    "containers": (Containers, trained_by(sgd), rows(32, 32)),
    "tied": (Tied, trained_by(sgd, functional.cross_entropy), (LABELS.view(8, 4), LABELS)),
    "lstm": (lambda: Recurrent(nn.LSTM), trained_by(sgd), (rows(8, 4, 16)[0], rows(8, 32)[0])),
    "gru": (lambda: Recurrent(nn.GRU), trained_by(sgd), (rows(8, 4, 16)[0], rows(8, 32)[0])),
    "convolutions": (convolutions, trained_by(sgd, functional.cross_entropy), (rows(8, 3, 8, 8)[0], LABELS[:8])),
    "frozen": (half_frozen, trained_by(sgd), rows(32, 32)),
    "sizes that do not divide": (lambda: nn.Linear(7, 7), trained_by(sgd), rows(9, 7)),
    "written buffers": (lambda: spectral_norm(nn.Linear(32, 32)), trained_by(sgd), rows(32, 32)),
    "bags": (bags, trained_by(sgd, functional.cross_entropy), (torch.arange(64).view(16, 4), torch.arange(16) % 7)),
    "one element": (lambda: nn.Linear(1, 1), trained_by(sgd), rows(2, 1)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_planned_and_runs_as_predicted(name, tmp_path):
    make_model, make_step, args = PROGRAMS[name]
    torch.manual_seed(0)
    plain = make_model()
    gt.init(workers=4, mode="shapes")
    step = make_step(gt.to(copy.deepcopy(plain)))
    plan = gt.auto_shard(step, *args, mesh="2x2", machine=MACHINE, seconds=1.0)
    plan.to_yaml(tmp_path / "plan.yaml")
    assert str(plan.explain(next(iter(dict(plain.named_parameters())))))
    gt.shutdown()
    gt.init(workers=4, mode="virtual")
    gt.load_config(tmp_path / "plan.yaml")
    ours, theirs = make_step(gt.to(copy.deepcopy(plain))), make_step(plain)
    for number in range(3):
        with gt.debug.comm() as c:
            loss = ours(*args)
        tolerance = 2e-2 if name == "bfloat16" else 1e-4
        torch.testing.assert_close(loss.detach().cpu(), theirs(*args).detach(), rtol=tolerance, atol=tolerance)
        assert not number or c.bytes == plan.bytes  # the first step also sends what is sent once


HELD = ["adam", "fused sgd", "muon", "accumulation", "clipping", "closure", "frozen", "recomputed", "called twice"]


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [*HELD, "tied", "written buffers", "convolutions", "gru", "lstm", "bags"])
def test_a_worker_holds_the_predicted_memory(name, compiles, monkeypatch):
    """The most of several steps: repeated ones, which free tensors earlier, may hold less."""
    monkeypatch.setattr("gt.client.outbox.FREE_BYTES", 1)  # small models: tensors are freed at once, not by 128 KiB
    make_model, make_step, args = PROGRAMS[name]

    def make():
        step = make_step(gt.to(make_model()))
        return gt.compile(step) if compiles else step

    gt.init(workers=4, mode="virtual" if name in ("lstm", "bags") else "shapes")
    plan = gt.auto_shard(make(), *args, mesh="2x2", machine=MACHINE, seconds=1.0)
    gt.shutdown()
    gt.init(workers=4, mode="virtual")
    registry.add(Config({}, plan.config))
    step, peaks = make(), []
    for _ in range(6):
        with gt.debug.memory() as m:
            step(*args)
        peaks.append(m.peak)
    assert 0.95 * plan.memory <= max(peaks) <= 1.05 * plan.memory, (peaks, plan.memory)
    assert not compiles or step.skipped


def test_a_limit_is_refused_where_only_workers_know_the_memory():
    make_model, make_step, args = PROGRAMS["lstm"]
    gt.init(workers=4, mode="shapes")
    step = make_step(gt.to(make_model()))
    with pytest.raises(gt.SessionError, match=r"aten.mkldnn_rnn_layer.default .* mode='virtual'"):
        gt.auto_shard(step, *args, mesh="2x2", memory="1 GB", machine=MACHINE, seconds=1.0)
    gt.shutdown()
    gt.init(workers=4, mode="virtual")
    step = make_step(gt.to(make_model()))
    assert gt.auto_shard(step, *args, mesh="2x2", memory="1 GB", machine=MACHINE, seconds=1.0).memory > 100_000


def test_compiling_a_step_that_was_planned_eagerly_tells_what_it_adds(tmp_path):
    make_model, make_step, args = PROGRAMS["adam"]
    gt.init(workers=4, mode="shapes")
    for compiles in (False, True):
        step = make_step(gt.to(make_model()))
        plan = gt.auto_shard(
            gt.compile(step) if compiles else step, *args, mesh="2x2", memory="100 kB", machine=MACHINE
        )
        plan.to_yaml(tmp_path / f"{compiles}.yaml")
    gt.shutdown()
    gt.init(workers=4, mode="virtual")
    gt.load_config(tmp_path / "False.yaml")
    step = gt.compile(make_step(gt.to(make_model())))
    with pytest.warns(RuntimeWarning, match=r"holds its plain arguments, 8.19 kB, .* within 100 kB .*") as seen:
        step(*args)
    assert seen[0].filename == __file__
    step(*args)  # once
    gt.compile(make_step(gt.to(make_model())))(*map(gt.to, args))  # holds what the eager step holds
    gt.load_config(tmp_path / "True.yaml")
    gt.compile(make_step(gt.to(make_model())))(*args)


def test_a_plan_counts_queries_that_the_session_has_asked_before():
    make_model, make_step, args = PROGRAMS["bags"]
    gt.init(workers=4, mode="virtual")
    first, second = [gt.auto_shard(make_step(gt.to(make_model())), *args, mesh="2x2", machine=MACHINE) for _ in "12"]
    assert first.memory == second.memory
