"""Strides that the client computes for pointwise ops and views, against torch's kernels on plain tensors."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from gt.client.shape_rules.views import view_strides
from gt.client.torch_strides import broadcast, iterated_strides

SIZES = st.sampled_from([1, 1, 2, 3])
KERNELS = {1: torch.neg, 2: torch.mul, 3: torch.addcmul}


@st.composite
def strided(draw, shape):
    """A tensor of a shape that is permuted, sliced or expanded in memory."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    kept = [1 if draw(st.sampled_from([False, False, False, True])) else size for size in shape]
    memory = torch.zeros([kept[dim] * steps[dim] for dim in order])
    back = [order.index(dim) for dim in range(len(shape))]
    return memory.permute(back)[tuple(slice(None, None, step) for step in steps)].expand(shape)


@st.composite
def operands(draw):
    shape = draw(st.lists(SIZES, max_size=5))
    count = draw(st.integers(1, 3))
    parts = []
    for _ in range(count):
        own = shape[draw(st.integers(0, len(shape))) :] if draw(st.booleans()) else shape
        own = [1 if draw(st.sampled_from([False, False, True])) else size for size in own]
        parts.append(draw(strided(own)))
    return parts


@given(operands())
def test_results_of_kernels_that_iterate(tensors):
    expected = KERNELS[len(tensors)](*tensors)
    shape = broadcast([tuple(tensor.shape) for tensor in tensors])
    assert shape == tuple(expected.shape)
    assert iterated_strides(shape, [(tuple(t.shape), t.stride()) for t in tensors]) == expected.stride()


def test_shapes_that_do_not_broadcast():
    assert broadcast([(2, 3), (2,)]) is None


@st.composite
def views(draw):
    tensor = draw(strided(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4))))
    sizes, rest = [], tensor.numel()
    while rest > 1:
        size = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        sizes.append(size)
        rest //= size
    return tensor, (*sizes, *[1] * draw(st.integers(0, 2)))


@given(views())
def test_strides_of_views(case):
    tensor, size = case
    assert math.prod(size) == tensor.numel()
    try:
        expected = tensor.view(size).stride()
    except RuntimeError:
        expected = None
    assert view_strides(tuple(tensor.shape), tensor.stride(), size) == expected
