"""A training program with `compile: true` on forward and backward: agrees with torch, and runs compiled code."""

import time

import pytest
import torch
from torch import nn

import gt
from tests.worker.compilation.recorded_units import needs_compiler

F = nn.functional


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).split(width, 2)
        q, k, v = [part.view(batch, length, 2, width // 2).transpose(1, 2) for part in parts]
        mixed = torch.softmax(q @ k.transpose(-2, -1) / 4.0, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(16), Layer(16), nn.Linear(16, 4))


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["virtual", "local"])
def test_compiled_training_agrees_with_torch(mode: str, monkeypatch: pytest.MonkeyPatch, no_signals: None) -> None:
    monkeypatch.setenv("GT_CHECK_GEOMETRY", "0")
    monkeypatch.setenv("GT_COMPILE_NICE", "0")
    gt.init(workers=2, mode=mode)
    rows = gt.ShardConfig(axis=0, workers=[0, 1])
    gt.register_config("forward", gt.SignalConfig(shard=rows, backward_signal="backward", compile=True))
    gt.register_config("backward", gt.SignalConfig(shard=rows, compile=True))
    plain, model = make_model(), gt.to(make_model())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    moved, targets = gt.to(x), gt.to(y)
    end = time.monotonic() + 1500
    ran = 0
    while ran < 50 and time.monotonic() < end:
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(plain(x).view(-1, 4), y.view(-1)).backward()
        with gt.signal.context("forward"):
            loss = F.cross_entropy(model(moved).view(-1, 4), targets.view(-1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        loss.item()
        ran = min(stats.compiled_runs for stats in gt.debug.get_worker_stats().values())
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    gt.shutdown()
    assert ran >= 50
    for parameter, expected in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected.detach(), rtol=1e-2, atol=1e-3)
