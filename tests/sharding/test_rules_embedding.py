"""Embeddings, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.samples import indices
from tests.sharding.simulate import check


@pytest.mark.parametrize("vocabulary", [7, 2, 1])
def test_embedding(vocabulary):
    check("aten.embedding.default", torch.randn(vocabulary, 3), indices(vocabulary, 2, 5))
    check("aten.embedding.default", torch.randn(vocabulary, 3), indices(vocabulary, 4).int(), 0)
    check("aten.embedding.default", torch.randn(vocabulary, 3), indices(vocabulary, 0))


def test_rows_of_other_shards_are_masked_without_multiplying():
    weight = torch.tensor([[1.0], [float("nan")], [float("inf")], [2.0]])
    check("aten.embedding.default", weight, torch.tensor([0, 3, 3]))


@pytest.mark.parametrize("padding", [-1, 0, 5])
def test_embedding_dense_backward(padding):
    check("aten.embedding_dense_backward.default", torch.randn(3, 5, 2), indices(7, 3, 5), 7, padding, False)
    check("aten.embedding_dense_backward.default", torch.randn(5, 2), indices(7, 5), 7, padding, True)
    check("aten.embedding_dense_backward.default", torch.randn(4, 3), indices(2, 4), 2, -1, False)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("features", [4, 1])
def test_embedding_bag_features(mode, features):
    weight, index, offsets = torch.randn(5, features), torch.tensor([0, 1, 4, 3]), torch.tensor([0, 1])
    check("aten._embedding_bag.default", weight, index, offsets, False, mode)
    check("aten._embedding_bag_forward_only.default", weight, index, offsets, False, mode)
    grad, bag = torch.randn(2, features), torch.tensor([0, 1, 1, 1])
    _, _, sizes, largest = torch.ops.aten._embedding_bag(weight, index, offsets, False, mode)
    check("aten._embedding_bag_dense_backward.default", grad, index, bag, sizes, largest, 5, False, mode, None)
    rest = (5, False, mode, False, None)
    check("aten._embedding_bag_backward.default", grad, index, offsets, bag, sizes, largest, *rest)


def test_embedding_bag_weights():
    index, offsets, bag = torch.tensor([0, 1, 4, 3]), torch.tensor([0, 1]), torch.tensor([0, 1, 1, 1])
    weights = torch.randn(4)
    check("aten._embedding_bag.default", torch.randn(5, 3), index, offsets, False, 0, False, weights)
    op = "aten._embedding_bag_per_sample_weights_backward.default"
    check(op, torch.randn(2, 3), torch.randn(5, 3), index, offsets, bag, 0)
