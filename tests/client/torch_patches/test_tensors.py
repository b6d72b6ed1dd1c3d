"""Tensors without memory, as torch makes them."""

from __future__ import annotations

import pytest
import torch

import gt
from gt.client.tensor import Tensor
from gt.client.torch_patches import tensors
from gt.client.torch_patches.tensors import edge_items, format_values


class Labelled(torch.Tensor):
    pass


def test_make_subclass_takes_plain_and_gt_tensors(embedded):
    for data in (torch.ones(2), gt.ones(2)):
        made = torch.Tensor._make_subclass(Labelled, data, True)
        assert isinstance(made, Labelled) and made.requires_grad, "Parameter subclasses of libraries could not be made"
        assert isinstance(made, gt.Tensor) is isinstance(data, gt.Tensor)


def test_results_of_ops_stay_in_the_users_class(embedded):
    made = gt.ones(2).as_subclass(Labelled)
    assert isinstance(made + 1, Labelled), "torch turns __torch_function__ off in another way than GT undoes"


def test_data_is_replaced_once_with_torchs_own_getter():
    patched = vars(torch.Tensor)["data"]
    getter = torch._C.TensorBase.data.__get__
    assert patched.fget.__name__ == getter.__name__ == "__get__", "reading .data of every plain tensor becomes slower"
    assert patched.fset.__module__ == "gt.client.torch_patches.tensors"
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


def test_values_are_formatted_as_torch_prints_them():
    assert format_values(torch.arange(3.0), 1000, 0) == "[0., 1., 2.]", "repr() of a GT tensor would fail"
    assert "..." in format_values(torch.arange(100.0), 0, 0), "large tensors would be printed whole"


def test_the_user_sets_how_much_is_shown():
    before = edge_items()
    torch.set_printoptions(edgeitems=5)
    try:
        assert edge_items() == 5, "printing would read another part of a large tensor than it shows"
    finally:
        torch.set_printoptions(edgeitems=before)


class Handle(torch.Tensor):
    __torch_function__ = tensors.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


def make(*shape):
    strides = torch.empty(shape, device="meta").stride()
    return tensors.make_handle(Handle, torch.Size(shape), strides, None, None, torch.float32)


def test_a_handle_has_a_shape_and_no_memory():
    x = make(2, 3)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (3, 1), torch.float32, "cpu"), (
        "no GT tensor can be made: _make_wrapper_subclass takes other arguments"
    )
    with pytest.raises(NotImplementedError, match="aten.neg.default"):  # or no op of a GT tensor arrives at dispatch()
        torch.neg(x)


def test_a_handle_changes_its_shape_in_place():
    x = make(2, 3)
    tensors.set_metadata(x, make(4))
    assert x.shape == (4,), "resize_(), gt.recover() and tensor.data = other would leave the old shape"


def test_handles_are_swapped_with_their_place_in_the_graph():
    x, y = torch.ones(2, requires_grad=True) * 2, torch.ones(3)
    function = x.grad_fn
    tensors.swap_tensors(x, y)
    assert y.grad_fn is function and x.shape == (3,), "views that change in place (t_, squeeze_) would lose gradients"


def test_lazy_bits_and_flags():
    x = torch.ones(2, dtype=torch.complex64)
    tensors.set_conjugated(x, True)
    tensors.set_negated(x, True)
    assert x.is_conj() and x.is_neg(), "lazily conjugated GT tensors would not say so"
    assert tensors.negative_view(torch.ones(1)).is_neg()
    assert tensors.is_view(torch.ones(2)[:1]) and not tensors.is_view(torch.ones(2))
    assert not tensors.is_zero_tensor(torch.ones(1)), "uploads of tangents in forward-mode AD check this"
    assert tensors.is_zero_tensor(torch._efficientzerotensor(2))


def test_gt_tensors_have_the_shape_of_a_handle(embedded):
    assert gt.ones(2, 3).shape == (2, 3)


def test_plain_tensors_are_swapped_by_torch(embedded):
    x, y, ours = torch.ones(2), torch.nn.Parameter(torch.zeros(3)), gt.ones(2)
    torch.utils.swap_tensors(x, y)
    assert isinstance(x, torch.nn.Parameter) and y.shape == (2,)
    other = gt.zeros(3)
    torch.utils.swap_tensors(ours, other)
    assert ours.tolist() == [0] * 3 and other.tolist() == [1] * 2, "conversions that swap parameters would fail"
