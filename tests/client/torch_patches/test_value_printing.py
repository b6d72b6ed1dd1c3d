"""Torch's formatting of values, with which GT tensors print themselves."""

import torch

from gt.client.torch_patches.value_printing import edge_items, format_values


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
