"""Tables of modules, parameters of subclasses, and parameters of lazy modules."""

from __future__ import annotations

import pytest
import torch
from torch.nn.modules import module
from torch.nn.parameter import UninitializedParameter
from torch.optim import optimizer

import gt
from gt.client.torch_patches.nn_modules import (
    GLOBAL_MODULE_HOOKS,
    GLOBAL_STEP_HOOKS,
    child_modules,
    is_parameter,
    mark_parameter,
    own_buffers,
    own_parameters,
    remove_forward_hooks,
)


@pytest.mark.parametrize(
    ("register", "hooks"),
    [
        (module.register_module_forward_hook, GLOBAL_MODULE_HOOKS),
        (module.register_module_forward_pre_hook, GLOBAL_MODULE_HOOKS),
        (module.register_module_full_backward_hook, GLOBAL_MODULE_HOOKS),
        (optimizer.register_optimizer_step_pre_hook, GLOBAL_STEP_HOOKS),
        (optimizer.register_optimizer_step_post_hook, GLOBAL_STEP_HOOKS),
    ],
)
def test_a_new_hook_is_among_them(register, hooks):
    handle = register(torch.neg)
    found = [torch.neg in each.values() for each in hooks]
    handle.remove()
    assert any(found)
    assert not any(torch.neg in each.values() for each in hooks)


def test_tables_hold_the_tensors_and_children_of_a_module():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    (child,) = child_modules(module).values()
    names = {*own_parameters(child), *own_buffers(child)}
    assert {"weight", "bias", "running_mean"} <= names, "gt.to(module) would move nothing"


def test_a_marked_tensor_of_a_subclass_is_a_parameter(embedded):
    x = gt.ones(2)
    assert not is_parameter(x)
    mark_parameter(x)
    assert isinstance(x, torch.nn.Parameter), "modules would not register GT tensors as parameters"


def test_lazy_parameters_are_made_on_gt_only_in_its_scope(embedded):
    plain = UninitializedParameter()
    with gt.device():
        ours = UninitializedParameter()
    assert not isinstance(plain, gt.Tensor) and isinstance(ours, gt.Tensor), "lazy modules would mix devices"


def test_plain_modules_are_what_torch_makes_of_them():
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    assert module.cpu() is module and module.weight is weight


class Hook:
    def __call__(self, *args):
        return None

    def after(self, *args):
        return None


def test_hooks_are_removed_by_the_classes_of_their_owners():
    module, hook = torch.nn.Linear(2, 2), Hook()
    module.register_forward_pre_hook(hook, with_kwargs=True)
    module.register_forward_hook(hook.after, always_call=True)
    module.register_forward_hook(lambda *args: None)
    remove_forward_hooks(module, (Hook,))
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (0, 1), "gt.to would double its hooks"
    assert not module._forward_pre_hooks_with_kwargs and not module._forward_hooks_always_called
