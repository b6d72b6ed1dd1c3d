"""Weight norm and renorm, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check, resolve


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim):
    v = torch.randn(5, 3, 2)
    g = torch.randn([size if position == dim else 1 for position, size in enumerate(v.shape)])
    _, norm = resolve("aten._weight_norm_interface.default")(v, g, dim)
    check("aten._weight_norm_interface.default", v, g, dim)
    check("aten._weight_norm_interface_backward.default", torch.randn(v.shape), v, g, norm, dim)
    cut = ["-, x, -", "-, -, -"]
    check_expansion("aten._weight_norm_interface.default", v, g, dim, cut=cut)
    backward = ("aten._weight_norm_interface_backward.default", torch.randn(v.shape), v, g, norm, dim)
    check_expansion(*backward, cut=[cut[0], *cut, cut[1]])


def test_renorm_passes_its_dim():
    check("aten.renorm.default", torch.randn(5, 3, 2), 2, 0, 1.0)
    check("aten.renorm.default", torch.randn(5, 3), 1, -1, 0.5)
