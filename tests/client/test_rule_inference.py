"""Calls that differ only in their sizes: torch infers the first of a family, the op's rule all others."""

import copy

import pytest
import torch
from torch.nn import functional

import gt
from gt.client import active_session, call_inference, rule_inference
from gt.client.shape_rules.shape_rule import ShapeRule, Strided
from gt.core.errors import OpError

aten = torch.ops.aten


@pytest.fixture
def inferred(embedded, monkeypatch):
    """The names of the ops whose results torch has inferred."""
    names = []
    infer_result = call_inference.infer_result

    def noted(op, *rest):
        names.append(op.name)
        return infer_result(op, *rest)

    monkeypatch.setattr(call_inference, "infer_result", noted)
    return names


def same(ours, plain):
    assert (ours.shape, ours.stride(), ours.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert torch.equal(ours.cpu(), plain)


def test_a_new_length_asks_torch_for_nothing(inferred):
    plain = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    ours = gt.to(copy.deepcopy(plain))

    def run(model, place, length):
        x = place(torch.arange(2.0 * length * 8).view(2, length, 8))
        loss = model(x).softmax(-1).transpose(1, 2).flatten(1)[:, 1:].square().sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return [value.cpu() for value in (loss.detach(), *gradients)]

    run(ours, gt.to, 3)
    inferred.clear()
    for length in (4, 7):
        torch.testing.assert_close(run(ours, gt.to, length), run(plain, lambda x: x, length))
    assert not inferred


def test_dims_of_one_element_are_another_family(inferred):
    for length in (3, 1, 4):
        x = torch.rand(2, length)
        same(gt.to(x).t() + 1, x.t() + 1)
    assert inferred.count("aten.add.Tensor") == 2


def test_other_dtypes_are_another_family(inferred):
    for dtype in (torch.float32, torch.int64, torch.float32):
        x = torch.arange(len(inferred) + 2).to(dtype)
        same(gt.to(x) / 2, x / 2)
    assert inferred.count("aten.div.Tensor") == 2


def test_constants_are_another_family_where_the_rule_does_not_take_them(inferred):
    for size, dim in ((2, 0), (3, 0), (4, 1), (5, 1)):
        x = torch.rand(size, size + 1)
        same(gt.to(x).amax(dim), x.amax(dim))
    assert inferred.count("aten.amax.default") == 2


def test_memory_orders_of_one_family(inferred):
    for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0)):
        x = torch.rand(2, 3, 4).permute(order)
        same(-gt.to(torch.rand(2, 3, 4)).permute(order).copy_(gt.to(x)), -x)
    assert inferred.count("aten.neg.default") == 1


def test_views_of_new_sizes(inferred):
    for length in (5, 7, 9):
        x = torch.arange(4.0 * length).view(length, 4)
        ours = gt.to(x)
        same(ours[1:-1], x[1:-1])
        same(ours.view(-1, 2, 2), x.view(-1, 2, 2))
        for part, plain in zip(ours.split(2), x.split(2), strict=True):
            same(part, plain)
    assert inferred.count("aten.slice.Tensor") == 1
    assert inferred.count("aten.split.Tensor") == 1


def test_sizes_that_do_not_fit_raise_torchs_error(embedded):
    gt.ones(2, 3) @ gt.ones(3, 4)
    with pytest.raises((RuntimeError, OpError), match="mat1 and mat2 shapes cannot be multiplied"):
        gt.ones(2, 5) @ gt.ones(3, 4)


def test_empty_tensors_are_left_to_torch(inferred):
    for length in (3, 0, 4):
        x = torch.rand(length, 2)
        same(gt.to(x).sum(0), x.sum(0))
    assert inferred.count("aten.sum.dim_IntList") == 2


def test_a_rule_that_differs_from_torch_is_not_used(inferred, monkeypatch):
    wrong = ShapeRule(lambda *args, **kwargs: [Strided((1,), (1,))])
    monkeypatch.setattr(rule_inference, "rule_of", lambda func: wrong)
    for length in (3, 4, 5):
        assert (-gt.ones(length)).shape == (length,)
    assert inferred.count("aten.neg.default") == 3


def test_the_table_of_families_does_not_grow_without_bound(embedded, monkeypatch):
    monkeypatch.setattr(rule_inference, "MAX_FAMILIES", 4)
    for rank in range(1, 12):
        same(-gt.ones([2] * rank), -torch.ones([2] * rank))
    assert len(active_session.current().rule_inference) <= 4


def test_gradients_that_a_mask_excludes(embedded):
    for length in (3, 4):
        x, weight = torch.rand(length, 4), torch.rand(4, requires_grad=True)
        ours = gt.to(weight.detach()).requires_grad_()
        functional.layer_norm(gt.to(x), (4,), ours).sum().backward()
        functional.layer_norm(x, (4,), weight).sum().backward()
        torch.testing.assert_close(ours.grad.cpu(), weight.grad)
        weight.grad = None
