"""The stack of dispatch modes, which `gt.device()` reads and memory of the host is allocated outside of."""

import inspect

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gt.client.torch_patches.dispatch_modes import UntracedMode, current_dispatch_modes, disable_current_modes


class Recording(UntracedMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))


seen: list[object] = []


def test_modes_are_listed_and_can_be_disabled():
    with Recording() as mode:
        listed = current_dispatch_modes()
        with disable_current_modes():
            inside = current_dispatch_modes()
            torch.zeros(2)
    assert mode in listed, "gt.device() is not noticed: modules that are built in it stay plain"
    assert not inside and not seen, "reading a value inside gt.device() would make GT tensors instead of plain memory"


def test_torch_asks_whether_a_mode_is_hidden_from_dynamo():
    source = inspect.getsource(TorchDispatchMode)
    asks_or_wraps_nothing = "_should_skip_dynamo" in source or "dynamo" not in source
    assert asks_or_wraps_nothing, "torch wraps FactoryMode: the first gt.ones() imports dynamo (1.6 s)"
