"""A mesh of two hundred virtual workers."""

from __future__ import annotations

import copy

import pytest
import torch

import gt


def test_two_hundred_workers_agree():
    gt.init(workers=200, mode="virtual")
    try:
        mesh = gt.mesh((10, 20), ("dp", "tp"))
        a, b = torch.randn(60, 40), torch.randn(40, 50)
        c = gt.distribute(a, mesh, "dp, -") @ gt.distribute(b, mesh, "-, tp")
        torch.testing.assert_close(c.cpu(), a @ b)
        assert len(c.shards()) == 200 and c.shards()[199].shape == (6, 2)
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.ReLU(), torch.nn.Linear(60, 7))
        ours = gt.to(copy.deepcopy(model))
        for name, spec in {"0.weight": "tp, -", "0.bias": "tp", "2.weight": "-, tp", "2.bias": "-"}.items():
            parameter = ours.get_parameter(name)
            parameter.data = gt.distribute(parameter.data, mesh, spec)
        losses = []
        for side, x in ((model, a), (ours, gt.distribute(a, mesh, "dp, -"))):
            optimizer = torch.optim.SGD(side.parameters(), lr=0.1)
            loss = side(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
        for p, q in zip(model.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.detach().cpu(), p.detach(), atol=1e-5, rtol=1e-4)
    finally:
        gt.shutdown()
