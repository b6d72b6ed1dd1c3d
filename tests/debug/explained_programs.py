"""Programs whose explanations are compared with the bytes that workers count."""

import io

import torch
from torch import nn
from torch.nn import functional

import gt

STEPS = 4  # later ones run in segments

PLANS = {
    "data parallel": """
rows: {shard: {axis: 0, workers: [0, 1]}}
model: {"*": rows}
""",
    "tensor parallel": """
model:
  mesh: {tp: 2}
  "up.weight": [tp, -]
  "up.bias": [tp]
  "down.weight": [-, tp]
""",
    "fully sharded": """
rows: {shard: {mesh: {dp: 2}, dims: [dp]}}
model:
  mesh: {dp: 2}
  "*.weight": [dp]
  "*.bias": [dp]
  "*": rows
""",
    "pipeline": """
first: {shard: {replicate: true, workers: [0]}}
second: {shard: {replicate: true, workers: [1]}}
model: {"up": first, "down": second}
""",
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


def train(model, x, y, steps=STEPS):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def explained(act, **options):
    """The explanation of a function, and the communication around it."""
    with gt.debug.comm() as comm, gt.explain(file=io.StringIO(), **options) as explanation:
        act()
    return explanation, comm


def sharded(spec, shape=(4, 6)):
    return gt.distribute(torch.ones(shape), gt.mesh(2, ("x",)), spec)


def check_bytes(tmp_path, plan):
    (tmp_path / "plan.yaml").write_text(PLANS[plan])
    gt.load_config(tmp_path / "plan.yaml")
    model, x, y = gt.to(Model()), gt.to(torch.randn(8, 8)), gt.to(torch.randn(8, 4))
    for steps in (1, STEPS):
        explanation, comm = explained(lambda steps=steps: train(model, x, y, steps))
        assert explanation.bytes == comm.bytes
        assert explanation.dropped == 0
    assert comm.bytes > 0
    planned = {(event.kind, event.line): 0 for event in comm.events}
    for event in comm.events:
        planned[event.kind, event.line] += event.bytes
    seen = {(use.kind, line.line): use.bytes for line in explanation.lines for use in line.collectives if use.bytes}
    assert seen == {key: nbytes for key, nbytes in planned.items() if nbytes}
