"""`torch.Tensor.data`, which GT replaces for the whole process: plain tensors behave as before."""

import torch

import gt
from gt.client.tensor import Tensor


def test_data_is_replaced_once_with_torchs_own_getter():
    patched = vars(torch.Tensor)["data"]
    getter = torch._C.TensorBase.data.__get__
    assert patched.fget.__name__ == getter.__name__ == "__get__", "reading .data of every plain tensor becomes slower"
    assert patched.fset.__module__ == "gt.client.torch_patches.data_property"
    assert "data" in vars(Tensor)


def test_plain_tensors_exchange_data_as_before():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.data = value = torch.ones(3)
    assert parameter.data_ptr() == value.data_ptr(), "torch no longer shares memory in tensor.data = other"
    assert parameter.requires_grad and not parameter.data.requires_grad


def test_a_plain_tensor_takes_the_value_of_a_gt_tensor(embedded):
    plain = torch.zeros(2)
    plain.data = gt.ones(2)
    assert type(plain) is torch.Tensor and plain.tolist() == [1, 1], "PEFT could not load weights onto GT tensors"
