"""The hooks that torch calls for every module, and for the step of every optimizer."""

import pytest
import torch
from torch.nn.modules import module
from torch.optim import optimizer

from gt.client.torch_patches.global_hooks import GLOBAL_MODULE_HOOKS, GLOBAL_STEP_HOOKS


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
