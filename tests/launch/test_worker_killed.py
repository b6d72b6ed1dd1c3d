"""Workers are killed at random points of a data parallel training loop."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import threading

import pytest
import torch

import gt
from gt.client import active_session

ROUNDS = 6
MESHES = [((3,), ("dp",)), ((2, 2), ("dp", "tp"))]  # weights are replicated along dp and cut along tp
PLACE = re.compile(r"test_worker_killed\.py(:|\", line )\d+")


def train(model, optimizer, batches, steps=100_000):
    """Every third step reads its loss."""
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(batches[number % len(batches)]).square().mean()
        loss.backward()
        optimizer.step()
        if number % 3 == 0:
            loss.item()


def replicated(module, mesh):
    first = "tp" if "tp" in mesh.axis_names else "-"
    for parameter in module.parameters():
        parameter.data = gt.distribute(parameter.data, mesh, ", ".join([first, *"-" * (parameter.dim() - 1)]))
    return module


def network(nn):
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64))


def assert_of_one_step(model, optimizer, start, batches):
    """All is what plain torch has after so many steps as the counters say."""
    (count,) = {int(entries["step"]) for entries in optimizer.state.values()} or {0}
    twin = network(torch.nn)
    twin.load_state_dict(start)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    train(twin, twin_optimizer, batches, count)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), other.detach(), rtol=1e-3, atol=1e-3)
        for name in optimizer.state[parameter].keys() - {"step"}:
            found, expected = optimizer.state[parameter][name].cpu(), twin_optimizer.state[other][name]
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_an_exchange_whose_peer_is_killed_is_the_loss_of_that_worker(seed):
    """Weights and the optimizer's state are then recovered from the workers that are left."""
    chance = random.Random(seed)
    shape, names = MESHES[seed % len(MESHES)]
    gt.init(workers=math.prod(shape))
    timer = None
    try:
        mesh = gt.mesh(shape, names)
        model = replicated(network(gt.nn), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        start = {name: value.cpu() for name, value in model.state_dict().items()}
        plain = [torch.randn(48, 16) for _ in range(3)]
        # Of the last batch every worker holds rows that no other has: without it, training may go on with replicas.
        layouts = ["dp, -", "dp, -", f"{' '.join(names)}, -"]
        batches = [gt.distribute(gt.to(batch), mesh, each) for batch, each in zip(plain, layouts, strict=True)]
        model(batches[0]).sum().item()
        victim = chance.choice(active_session.current().workers)
        timer = threading.Timer(chance.uniform(0.0, 0.4), os.kill, (victim.pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(gt.WorkerLost, match=rf"worker {victim.worker} \(pid {victim.pid}\)") as caught:
            train(model, optimizer, batches)
        assert PLACE.search(str(caught.value)), str(caught.value)
        assert "?:0" not in str(caught.value) and "<unknown>" not in str(caught.value)
        gt.recover(model, optimizer)
        assert_of_one_step(model, optimizer, start, plain)
    finally:
        if timer is not None:
            timer.cancel()
        gt.shutdown()
