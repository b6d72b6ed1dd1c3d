"""Distances of rows, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.simulate import MESHES, check


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
def test_distances(p: float) -> None:
    x, y = torch.randn(2, 5, 3), torch.randn(4, 3)
    few = MESHES[1:]
    check("aten._cdist_forward.default", x, y, p, None, meshes=few)
    distances = torch.cdist(x, y, p)
    check("aten._cdist_backward.default", torch.randn(2, 5, 4), x, y.expand(2, 4, 3).clone(), p, distances, meshes=few)
    check("aten._cdist_backward.default", torch.randn(2, 4, 5), y, x, p, distances.mT.contiguous(), meshes=MESHES[2:])


def test_euclidean_distances() -> None:
    check("aten._euclidean_dist.default", torch.randn(5, 3), torch.randn(4, 3), tolerance=1e-2)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, float("inf")])
@pytest.mark.parametrize("rows", [2, 5])
def test_distances_of_pairs_of_rows(p: float, rows: int) -> None:
    x = torch.randn(rows, 3)
    check("aten._pdist_forward.default", x, p)
    distances = torch.ops.aten._pdist_forward(x, p)
    check("aten._pdist_backward.default", torch.randn_like(distances), x, p, distances)
