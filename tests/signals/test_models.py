"""A model laid out by the names of its parts."""

import logging

import pytest
import torch

import gt
from gt.client.scope_stack import top
from gt.core.errors import SignalError

PAIR = "one: {shard: {axis: 0, workers: [0, 1]}}\ntwo: {shard: {axis: 0, workers: [2, 3]}}\n"


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.body = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])
        self.last = torch.nn.Linear(6, 8, bias=False)
        self.last.weight = torch.nn.Parameter(self.first.weight.detach().t().contiguous())
        self.head = self.last

    def forward(self, x, fails=False):
        x = self.norm(self.first(x))
        for layer in self.body:
            x = layer(x).relu()
        if fails:
            raise KeyError("inside")
        return self.head(x)


def load(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return gt.load_config(path)


def layouts(model):
    return {name: str(tensor.spec) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def test_parameters_and_buffers_are_laid_out_by_their_names(four_workers, tmp_path):
    load(tmp_path, 'model:\n  mesh: {tp: 4}\n  "*.weight": [tp]\n  "body.[01].weight": [-, tp]\n  "first.bias": [tp]\n')
    model = gt.to(Tied())
    assert layouts(model) == {
        "first.weight": "tp, -", "first.bias": "tp", "norm.weight": "tp", "norm.bias": "-", "body.0.weight": "-, tp",
        "body.0.bias": "-", "body.1.weight": "-, tp", "body.1.bias": "-", "body.2.weight": "tp, -", "body.2.bias": "-",
        "last.weight": "tp, -", "norm.running_mean": "-", "norm.running_var": "-", "norm.num_batches_tracked": "",
    }  # fmt: skip
    assert all(tensor.spec.mesh.size == 4 for tensor in [*model.parameters(), *model.buffers()])
    assert model.head.weight is model.last.weight
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in model.parameters())


def test_what_shares_memory_stays_tied_in_its_layout(four_workers, tmp_path):
    load(tmp_path, 'model:\n  mesh: {tp: 4}\n  "*.weight": [tp]\n')
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
    model[1].weight.data = model[0].weight.data
    model.register_buffer("transposed", model[0].weight.data.t())
    gt.to(model)
    with torch.no_grad():
        model[0].weight[1] = 7
    assert model[1].weight[1].tolist() == model.transposed[:, 1].tolist() == [7.0] * 4
    assert layouts(model) == {"0.weight": "tp, -", "1.weight": "tp, -", "transposed": "-, -"}


def test_lazy_parameters_are_left_out_of_a_plan(four_workers, tmp_path):
    load(tmp_path, 'model:\n  mesh: {tp: 4}\n  "*.weight": [tp]\n')
    model = gt.to(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyLinear(4)))
    model(gt.ones(2, 4))
    assert str(model[0].weight.spec) == "tp, -"
    assert str(gt.to(model)[1].weight.spec) == "tp, -"


PLANS = {
    "tensor": 'model:\n  mesh: {tp: 4}\n  "*.weight": [tp]\n',
    "grid": (
        "dp: {shard: {mesh: {dp: 2, tp: 2}, workers: [0, 1, 2, 3], dims: [dp]}}\n"
        'model:\n  mesh: {dp: 2, tp: 2}\n  "*.weight": [tp]\n  "*": dp\n'
    ),
    "data": 'dp: {shard: {axis: 0}}\nmodel: {"*": dp}\n',
    "pipeline": PAIR
    + 'model: {"first": one, "norm": one, "body.[0-1]": one, "body.2": two, "head": two, "last": two}\n',
    "none": "",
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_does_not_change_the_numbers(four_workers, tmp_path, plan):
    if PLANS[plan]:
        load(tmp_path, PLANS[plan])
    torch.manual_seed(0)
    plain = Tied()
    torch.manual_seed(0)
    ours = gt.to(Tied())
    data = torch.randn(3, 10, 8)
    losses = {}
    for name, model in (("plain", plain), ("ours", ours)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses[name] = []
        for batch in data:
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["ours"] == pytest.approx(losses["plain"], rel=1e-5)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_modules_run_in_scopes_and_leave_them(four_workers, tmp_path):
    load(tmp_path, PAIR + 'model: {"first": one, "norm": one, "body.*": two}\n')
    model = gt.to(Tied())
    seen = {}
    for name, part in model.named_modules():
        part.register_forward_hook(lambda module, args, out, name=name: seen.update({name: out.spec.mesh.workers}))
    model(gt.randn(4, 8))
    assert {name: seen[name] for name in ("first", "norm", "body.0", "body.2")} == {
        "first": (0, 1), "norm": (0, 1), "body.0": (2, 3), "body.2": (2, 3),
    }  # fmt: skip
    assert top() is None
    with pytest.raises(KeyError):
        model(gt.randn(4, 8), fails=True)
    with pytest.raises(RuntimeError):
        model(gt.randn(4, 9))
    assert top() is None


def test_moving_a_module_again_applies_the_plan_that_is_configured_now(four_workers, tmp_path):
    load(tmp_path, PAIR + 'model: {"first": one}\n')
    model = gt.to(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    load(tmp_path, PAIR + 'model: {"0": two, "1": one}\n')
    gt.to(model)
    gt.to(model)
    assert len(model[0]._forward_pre_hooks) == 1
    assert model(gt.randn(4, 4)).spec.mesh.workers == (2, 3)


def test_on_the_embedded_worker_a_plan_changes_nothing(tmp_path):
    gt.init()
    load(tmp_path, PLANS["grid"])
    torch.manual_seed(0)
    model = gt.to(Tied())
    torch.manual_seed(0)
    plain = Tied()
    x = torch.randn(6, 8)
    torch.testing.assert_close(model(x).cpu(), plain(x))
    gt.shutdown()


def test_a_pattern_that_matches_nothing_is_reported(four_workers, tmp_path, caplog):
    load(tmp_path, 'model:\n  mesh: {tp: 4}\n  "*.weight": [tp]\n  "frist.bias": [tp]\n')
    with caplog.at_level(logging.WARNING, "gt.signals"):
        gt.to(Tied())
    (record,) = caplog.records
    assert "plan.yaml:4: 'frist.bias' decides about no parameter" in record.message
    assert "first.bias" in record.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'model:\n  mesh: {tp: 4}\n  "*.bias": [-, tp]\n',
            r"plan.yaml:3: '\*.bias' names 2 dims, and .*bias has the shape",
        ),
        ('model:\n  mesh: {tp: 8}\n  "*.bias": [tp]\n', r"plan.yaml:2?.*model needs workers 0 to 7.*GT_WORKERS=8"),
        ("model:\n  mesh: {tp: 4}\n  first.weight: [tp]\n  body.0.weight: [-, tp]\n", "tied parameter in two ways"),
    ],
)
def test_errors(four_workers, tmp_path, text, message):
    load(tmp_path, text)
    model = Tied()
    model.body[0].weight = model.first.weight
    with pytest.raises(SignalError, match=message):
        gt.to(model)
