"""Backward ops with an output mask, and errors in rules."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gt
from gt.sharding.factors import bind
from gt.sharding.rules import TABLE, entry_of
from gt.sharding.rules.entry import OpEntry

CASES = {
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(8, 4, 5, 5), (4,), (4,)]),
    "batch_norm in evaluation": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(4), torch.ones(4), w, b, False),
        [(8, 4, 5, 5), (4,), (4,)],
    ),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), [(8, 4, 5, 5), (4,), (4,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(8, 4, 5, 5), (4,), (4,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), [(8, 4, 5, 5), (5,), (5,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(8, 4, 5, 5), (4, 4, 3, 3), (4,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(8, 4, 5, 5), (4, 4, 3, 3), (4,)]),
    "grid_sample": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), [(8, 4, 5, 5), (8, 3, 3, 2)]),
}
LAYOUTS = {"rows": gt.Shard(0), "channels": gt.Shard(1), "space": gt.Shard(2), "partial": gt.Partial()}


@pytest.fixture(autouse=True)
def _workers(eight_workers):
    """All tests here share eight workers."""


def gradients(function, values, mask, distribute):
    leaves = [distribute(value.clone()).requires_grad_(needs) for value, needs in zip(values, mask, strict=True)]
    result = function(*leaves)
    (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
    return [None if leaf.grad is None else torch.as_tensor(leaf.grad.cpu()) for leaf in leaves]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_any_subset_of_gradients_may_be_requested(name, layout):
    function, shapes = CASES[name]
    values, mesh = [torch.randn(shape) for shape in shapes], gt.mesh(3, ("a",))

    def distribute(value):
        return gt.distribute(value, mesh, [LAYOUTS[layout] if value.shape == shapes[0] else gt.Replicate()])

    for mask in itertools.product((True, False), repeat=len(shapes)):
        if any(mask):
            expected = gradients(function, values, mask, lambda value: value)
            torch.testing.assert_close(gradients(function, values, mask, distribute), expected, rtol=1e-4, atol=1e-4)


def test_a_norm_as_first_layer_on_a_mesh_of_one_worker():
    mesh, layer = gt.mesh(1, ("a",)), torch.nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 2, 2)
    layer(x).square().sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    gt.to(layer)(gt.shard(x, mesh)).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), expected)


def test_a_mistake_in_a_rule_fails_its_op_and_nothing_else(monkeypatch):
    wrong = OpEntry(lambda call: bind("a -> a, a", call.shapes, call.result_shapes))
    monkeypatch.setitem(TABLE, "aten.cosh", wrong)
    entry_of.cache_clear()
    x = gt.shard(torch.ones(6), gt.mesh(3, ("a",)))
    result, other = x.cosh(), x + 1
    with pytest.raises(gt.OpError, match=r"mistake in its sharding rule of aten.cosh(.|\n)*LayoutError"):
        result.sum().item()
    written = x.clone()
    written.cosh_()
    with pytest.raises(gt.OpError, match=r"mistake in its sharding rule of aten.cosh_"):
        written.cpu()
    assert other.tolist() == [2.0] * 6
    monkeypatch.undo()
    entry_of.cache_clear()
