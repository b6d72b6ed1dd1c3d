"""Tables of modules, parameters of subclasses, and parameters of lazy modules."""

import torch
from torch.nn.parameter import UninitializedParameter

import gt
from gt.client.torch_patches.nn_modules import child_modules, is_parameter, mark_parameter, own_buffers, own_parameters


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
