"""Layouts of a model's inputs and of the results of its modules, from the `model` section."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gt
from gt.signals.registry import registry


@pytest.fixture(autouse=True)
def workers():
    gt.shutdown()
    registry.clear()
    gt.init(workers=4, mode="virtual")
    yield
    gt.shutdown()
    registry.clear()


def load(tmp_path, text):
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    return gt.load_config(file)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.up(x).relu()
        return self.down(hidden), hidden.sum()


PLAN = """
model:
  mesh: {dp: 2, tp: 2}
  "up.weight": [tp, -]
  "up.bias": [tp]
  "down.weight": [-, tp]
  inputs: [dp, ...]
  outputs:
    up: [dp, -, tp]
    down: [dp, -, -]
"""


def test_inputs_and_results_have_the_layouts_of_the_file(tmp_path):
    load(tmp_path, PLAN)
    torch.manual_seed(0)
    plain = Net()
    model, x = gt.to(copy.deepcopy(plain)), torch.randn(4, 6, 8)
    results = {}
    model.up.register_forward_hook(lambda module, args, out: results.update(up=str(out.spec)))
    with gt.debug.comm() as c:
        y, total = model(x)
    assert results["up"] == "dp, -, tp" and str(y.spec) == "dp, -, -"
    assert [(event.kind, event.axis) for event in c.events] == [("all-reduce", "tp")]
    torch.testing.assert_close(y.cpu(), plain(x)[0])
    torch.testing.assert_close(total.cpu(), plain(x)[1])


def test_gradients_of_results_get_the_same_layouts_and_values_are_torchs(tmp_path):
    load(tmp_path, PLAN)
    torch.manual_seed(0)
    plain = Net()
    model, x = gt.to(copy.deepcopy(plain)), torch.randn(4, 6, 8)
    for net in (plain, model):
        y, total = net(x)
        (y.square().sum() + total).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_a_tensor_on_gt_is_placed_and_one_of_another_rank_is_left(tmp_path):
    load(tmp_path, "model: {mesh: {dp: 4}, inputs: [dp, -]}")
    model = gt.to(torch.nn.Identity())
    x, y = gt.to(torch.ones(8, 4)), gt.to(torch.ones(8, 4, 2))
    model(x)
    model(y)
    assert str(x.spec) == "dp, -" and y.spec.mesh.size == 1


def test_a_dim_that_is_too_small_is_not_cut(tmp_path):
    load(tmp_path, "model: {mesh: {dp: 4}, inputs: [dp, ...]}")
    assert str(gt.to(torch.nn.Identity())(torch.ones(2, 4)).spec) == "-, -"


def test_a_view_is_placed_by_way_of_its_base(tmp_path):
    load(tmp_path, 'model: {mesh: {dp: 4}, outputs: {"0": [-, dp]}}')

    class Transposed(torch.nn.Module):
        def forward(self, x):
            return (x + 1).t()

    y = gt.to(torch.nn.Sequential(Transposed()))(gt.to(torch.ones(8, 4)))
    assert str(y.spec) == "-, dp"
    assert torch.equal(y.cpu(), torch.full((4, 8), 2.0))


def test_a_pattern_of_outputs_that_matches_nothing_is_a_warning(tmp_path, caplog):
    load(tmp_path, 'model: {mesh: {dp: 4}, outputs: {"0": [dp], "2": [dp]}}')
    gt.to(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert "'2' decides about no module" in caplog.text


class Odd(torch.nn.Module):
    """A module that runs twice and gives a dict and a tuple, and one that gives its input back."""

    def __init__(self, run):
        super().__init__()
        self.inner, self.same, self.run = Nested(), torch.nn.Identity(), run

    def forward(self, x):
        first = self.run(self.inner, self.same(x))
        second = self.run(self.inner, first["y"])
        return second["y"] + second["rest"][0] + first["rest"][1][0]


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return {"y": y.relu(), "rest": (y.sum(-1, keepdim=True), [y.tanh(), None, 3])}


ODD_RUNS = {
    "plain": lambda module, x: module(x),
    "recomputed": lambda module, x: checkpoint(module, x, use_reentrant=False),
}
ODD_PLAN = """
model:
  mesh: {dp: 2, tp: 2}
  "*.weight": [tp, -]
  inputs: [dp, ...]
  outputs: {inner: [dp, tp], same: [dp, -], "inner.linear": [dp, tp]}
"""


@pytest.mark.parametrize("run", ODD_RUNS)
def test_modules_that_run_twice_and_give_containers_have_torchs_values(tmp_path, run):
    load(tmp_path, ODD_PLAN)
    torch.manual_seed(0)
    plain, x = Odd(ODD_RUNS[run]), torch.randn(4, 8, requires_grad=True)
    model, found = gt.to(copy.deepcopy(plain)), []
    model.inner.register_forward_hook(lambda module, args, out: found.append(str(out["y"].spec)))
    for net in (plain, model):
        net(x).square().sum().backward()
    assert set(found) == {"dp, tp"} and len(found) in (2, 4)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_results_that_are_recomputed_have_torchs_gradients(tmp_path, reentrant):
    load(tmp_path, PLAN)
    torch.manual_seed(0)
    plain = Net()
    model, x = gt.to(copy.deepcopy(plain)), torch.randn(4, 6, 8, requires_grad=True)
    for net in (plain, model):
        y, total = checkpoint(net, x, use_reentrant=reentrant)
        (y.square().sum() + total).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_are_laid_out_without_gradients_too(tmp_path, mode):
    load(tmp_path, ODD_PLAN)
    torch.manual_seed(0)
    plain, x = Odd(ODD_RUNS["plain"]), torch.randn(4, 8)
    model = gt.to(copy.deepcopy(plain))
    with mode():
        torch.testing.assert_close(model(x).cpu(), plain(x))
        assert str(model.inner(x)["y"].spec) == "dp, tp"


def test_a_module_that_gives_a_leaf_back_leaves_no_hooks_on_it(tmp_path):
    load(tmp_path, 'model: {mesh: {dp: 4}, outputs: {"*": [dp, -]}}')
    model, x = gt.to(torch.nn.Identity()), gt.to(torch.ones(8, 4)).requires_grad_()
    for _ in range(3):
        model(x)
    assert not x._backward_hooks
    (model(x) * 2).sum().backward()
    assert torch.equal(x.grad.cpu(), torch.full((8, 4), 2.0))
