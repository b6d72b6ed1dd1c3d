"""Tensors without memory, as torch makes them."""

import pytest
import torch

import gt
from gt.client.torch_patches import wrapper_tensors


class Handle(torch.Tensor):
    __torch_function__ = wrapper_tensors.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


def make(*shape):
    strides = torch.empty(shape, device="meta").stride()
    return wrapper_tensors.make_handle(Handle, torch.Size(shape), strides, None, None, torch.float32)


def test_a_handle_has_a_shape_and_no_memory():
    x = make(2, 3)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (3, 1), torch.float32, "cpu"), (
        "no GT tensor can be made: _make_wrapper_subclass takes other arguments"
    )
    with pytest.raises(NotImplementedError, match="aten.neg.default"):  # or no op of a GT tensor arrives at dispatch()
        torch.neg(x)


def test_a_handle_changes_its_shape_in_place():
    x = make(2, 3)
    wrapper_tensors.set_metadata(x, make(4))
    assert x.shape == (4,), "resize_(), gt.recover() and tensor.data = other would leave the old shape"


def test_handles_are_swapped_with_their_place_in_the_graph():
    x, y = torch.ones(2, requires_grad=True) * 2, torch.ones(3)
    function = x.grad_fn
    wrapper_tensors.swap_tensors(x, y)
    assert y.grad_fn is function and x.shape == (3,), "views that change in place (t_, squeeze_) would lose gradients"


def test_lazy_bits_and_flags():
    x = torch.ones(2, dtype=torch.complex64)
    wrapper_tensors.set_conjugated(x, True)
    wrapper_tensors.set_negated(x, True)
    assert x.is_conj() and x.is_neg(), "lazily conjugated GT tensors would not say so"
    assert wrapper_tensors.negative_view(torch.ones(1)).is_neg()
    assert wrapper_tensors.is_view(torch.ones(2)[:1]) and not wrapper_tensors.is_view(torch.ones(2))
    assert not wrapper_tensors.is_zero_tensor(torch.ones(1)), "uploads of tangents in forward-mode AD check this"
    assert wrapper_tensors.is_zero_tensor(torch._efficientzerotensor(2))


def test_gt_tensors_have_the_shape_of_a_handle(embedded):
    assert gt.ones(2, 3).shape == (2, 3)


def test_plain_tensors_are_swapped_by_torch(embedded):
    x, y, ours = torch.ones(2), torch.nn.Parameter(torch.zeros(3)), gt.ones(2)
    torch.utils.swap_tensors(x, y)
    assert isinstance(x, torch.nn.Parameter) and y.shape == (2,)
    other = gt.zeros(3)
    torch.utils.swap_tensors(ours, other)
    assert ours.tolist() == [0] * 3 and other.tolist() == [1] * 2, "conversions that swap parameters would fail"
