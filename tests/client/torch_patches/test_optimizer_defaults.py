"""The choice between the implementations of an optimizer, and that both round in the same way."""

import copy
import importlib
import inspect

import pytest
import torch

import gt
from gt.client.torch_patches import optimizer_defaults
from gt.client.torch_patches.optimizer_defaults import SAME_BITS

NAMES = {"adadelta": "Adadelta", "adagrad": "Adagrad", "adam": "AdamW", "rmsprop": "RMSprop", "rprop": "Rprop"}
NAMES["sgd"] = "SGD"
OPTIONS = [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"amsgrad": True}, {"centered": True}]
OPTIONS += [{"weight_decay": 0.1, "maximize": True}, {"lr_decay": 0.1}, {"lr": torch.tensor(0.02)}]


def module_of(name):
    return importlib.import_module(f"torch.optim.{name}")


@pytest.mark.parametrize("name", SAME_BITS)
def test_an_optimizer_asks_for_the_choice(name):
    source = inspect.getsource(module_of(name))
    assert "_default_to_fused_or_foreach(" in source, "default optimizers on GT would issue 12 ops a parameter"
    choose = module_of(name)._default_to_fused_or_foreach
    assert choose([torch.ones(2)], False) == (False, False), (
        "plain tensors would be updated in another way than torch's"
    )


def test_the_choice_for_tensors_on_gt(embedded):
    choose = module_of("adam")._default_to_fused_or_foreach
    with torch.no_grad():  # as in a step
        assert choose([gt.ones(2), gt.ones(3, dtype=torch.float64)], False) == (False, True)
        assert choose([gt.ones(2), torch.ones(2)], False) == (False, False)
        assert choose([gt.ones(2, dtype=torch.bfloat16)], False) == (False, False)
        assert choose([gt.ones(2)], True) == (False, False)  # differentiable
        assert choose([], False) == (False, True)
    assert choose([gt.ones(2)], False) == (False, False)  # a differentiable step of SGD


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_step_is_differentiable_by_its_learning_rate(embedded, name):
    def gradients(to):
        x, rate = (to(torch.tensor(value)).requires_grad_() for value in ([1.0, -2.0, 3.0], 0.1))
        parameter = x.clone()
        optimizer = getattr(torch.optim, name)([parameter], lr=rate, differentiable=True)
        parameter.grad = x * 2
        optimizer.step()
        parameter.sum().backward()
        return [x.grad.tolist(), rate.grad.tolist()]

    found, wanted = gradients(gt.to), gradients(lambda tensor: tensor)
    assert found == [pytest.approx(each) for each in wanted]


@pytest.mark.parametrize("name", SAME_BITS)
def test_a_default_step_leaves_gradients_as_torch_does(embedded, name):
    kind = getattr(torch.optim, NAMES[name])
    known = inspect.signature(kind.__init__).parameters.keys()
    for options in [each for each in OPTIONS if known >= each.keys()]:
        found = []
        for to in (torch.clone, gt.to):
            parameter = to(torch.tensor([1.0, -2.0, 3.0])).detach().requires_grad_()
            parameter.grad = to(torch.tensor([0.5, -0.5, 2.0]))
            optimizer = kind([parameter], **options)
            for _ in range(3):  # the gradient is kept between the steps
                optimizer.step()
            found.append((parameter.grad.tolist(), parameter.tolist()))
        torch.testing.assert_close(*found, msg=str(options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SAME_BITS)
def test_both_implementations_have_the_same_bits(name, dtype):
    kind = getattr(torch.optim, NAMES[name])
    known = inspect.signature(kind.__init__).parameters.keys()
    for options in [each for each in OPTIONS if known >= each.keys()]:
        if name == "adam" and isinstance(options.get("lr"), torch.Tensor):
            continue  # torch has no implementation on lists for it
        results = []
        for lists in (False, True):
            torch.manual_seed(0)
            parameters = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((7, 5), (11,), ())]
            optimizer = kind(parameters, foreach=lists, **options)
            for _ in range(12):
                for parameter in parameters:
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
            results.append(parameters)
        told = f"torch has changed {name}: default steps on GT would round in another way than torch's"
        assert all(map(torch.equal, *results)), told


def test_lists_of_tensors_on_gt_are_buckets(embedded, monkeypatch):
    monkeypatch.setattr(optimizer_defaults, "BUCKET_BYTES", 16)
    parameters, others = [gt.ones(size) for size in (1, 4, 2, 2, 1)], [None, gt.ones(4), None, gt.ones(2), None]
    grouped = torch.optim.Optimizer._group_tensors_by_device_and_dtype([parameters, others, []], with_indices=True)
    sizes = [[tensor.numel() for tensor in lists[0]] for lists, _ in grouped.values()]
    told = "a step would hold intermediate results of all parameters at once"
    assert sizes == [[1, 4], [2, 2], [1]] and [indices for _, indices in grouped.values()] == [[0, 1], [2, 3], [4]], (
        told
    )
    assert [lists[2] for lists, _ in grouped.values()] == [[], [], []]
    assert [[other is None for other in lists[1]] for lists, _ in grouped.values()] == [
        [True, False],
        [True, False],
        [True],
    ]
    assert all(len(key) == 2 for key in grouped), "fused optimizers take keys apart"


def test_lists_of_plain_tensors_are_torchs():
    (key,) = torch.optim.Optimizer._group_tensors_by_device_and_dtype([[torch.ones(2), torch.ones(3)]])
    assert key == (torch.device("cpu"), torch.float32)


def test_optimizers_that_are_given_a_state_are_told(monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "__setstate__", torch.optim.Optimizer.__setstate__)
    told = []
    optimizer_defaults.call_after_loading(told.append)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    optimizer.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy(optimizer)
    assert told == [optimizer, copied], "loaded states would stay where the file had them"
