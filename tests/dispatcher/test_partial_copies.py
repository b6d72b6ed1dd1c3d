"""An op that needs a part of a tensor, or overlapping parts, leaves the tensor unchanged."""

import contextlib

import pytest
import torch
from torch.nn import functional

import gt

KERNEL = torch.ones(2, 3, 2, 2)
NEEDS = {
    "windows that skip": lambda x: functional.max_pool2d(x, 2, 3),
    "means that skip": lambda x: functional.avg_pool2d(x, (2, 2), (3, 3)),
    "strides that skip": lambda x: functional.conv2d(x, KERNEL, stride=3),
    "a negative pad": lambda x: functional.pad(x, (-2, 3, -1, -2)),
    "a tail that is left out": lambda x: functional.max_pool2d(x, (1, 4)),
    "halos": lambda x: functional.conv2d(x, torch.ones(2, 3, 3, 3), padding=1),
}
USES = {
    "sum": lambda x: x.sum((-1, -2)),
    "softmax": lambda x: x.softmax(-1),
    "in place": lambda x: x.clone().add_(1).cumsum(-1),
    "product": lambda x: x @ x.transpose(-1, -2),
    "the same again": lambda x: functional.max_pool2d(x, 2),
}
LAYOUTS = ["-, -, -, -", "-, -, -, a", "-, -, a, -", "-, a, -, -", "-, -, -, - + a"]


@pytest.fixture(scope="module", autouse=True)
def scope(eight_workers):
    gt.register_config("by width", gt.SignalConfig(shard=gt.ShardConfig(axis=-1, workers=[0, 1, 2])))


def inside(scope):
    return gt.signal.context("by width") if scope else contextlib.nullcontext()


@pytest.mark.parametrize("layout", [*LAYOUTS, None])
@pytest.mark.parametrize("need", NEEDS)
def test_a_tensor_is_complete_after_an_op_that_needs_a_part_of_it(need, layout):
    torch.manual_seed(0)
    plain = torch.randn(2, 3, 9, 10)
    for scoped in (False, True):
        for use in USES.values():
            x = gt.to(plain) if layout is None else gt.distribute(plain, gt.mesh(4, ("a",)), layout)
            with inside(scoped):
                part = NEEDS[need](x)
                used = use(x)
            torch.testing.assert_close(part.cpu(), NEEDS[need](plain), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(used.cpu(), use(plain), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(x.cpu(), plain, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_partial_tensor_that_is_pooled():
    def step(x, weight):
        weight = weight.detach().requires_grad_()
        hidden = functional.conv2d(x, weight, padding=1)
        (functional.max_pool2d(hidden, 2).sum() + hidden.tanh().sum()).backward()
        return weight.grad

    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 9, 9), torch.randn(3, 4, 3, 3)
    mesh = gt.mesh(4, ("tp",))
    ours = step(gt.distribute(x, mesh, "-, tp, -, -"), gt.distribute(weight, mesh, "-, tp, -, -"))
    torch.testing.assert_close(ours.cpu(), step(x, weight), rtol=1e-4, atol=1e-4)
