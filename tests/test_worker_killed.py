"""Workers are killed at random points of a data parallel training loop."""

from __future__ import annotations

import os
import random
import re
import signal
import threading

import pytest
import torch

import gt
from gt.client import session as sessions

ROUNDS = 6
PLACE = re.compile(r"test_worker_killed\.py(:|\", line )\d+")


def train(model, optimizer, batches):
    """Steps without end; every third reads its loss."""
    for number in range(100_000):
        optimizer.zero_grad()
        loss = model(batches[number % len(batches)]).square().mean()
        loss.backward()
        optimizer.step()
        if number % 3 == 0:
            loss.item()


def replicated(module, mesh):
    for parameter in module.parameters():
        parameter.data = gt.distribute(parameter.data, mesh, ", ".join("-" * parameter.dim()))
    return module


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_an_exchange_whose_peer_is_killed_is_the_loss_of_that_worker(seed):
    chance = random.Random(seed)
    gt.init(workers=3)
    timer = None
    try:
        mesh = gt.mesh(3, ("dp",))
        model = replicated(gt.nn.Sequential(gt.nn.Linear(16, 64), gt.nn.Tanh(), gt.nn.Linear(64, 64)), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batches = [gt.randn(48, 16, mesh=mesh, placements="dp, -") for _ in range(2)]
        model(batches[0]).sum().item()
        victim = chance.choice(sessions.current().workers)
        timer = threading.Timer(chance.uniform(0.0, 0.4), os.kill, (victim.pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(gt.WorkerLost, match=rf"worker {victim.worker} \(pid {victim.pid}\)") as caught:
            train(model, optimizer, batches)
        assert PLACE.search(str(caught.value)), str(caught.value)
        assert "?:0" not in str(caught.value) and "<unknown>" not in str(caught.value)
    finally:
        if timer is not None:
            timer.cancel()
        gt.shutdown()
