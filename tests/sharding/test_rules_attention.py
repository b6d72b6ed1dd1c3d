from __future__ import annotations

import pytest
import torch

from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check, resolve

ATTEND = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
INF = float("inf")


def tensors(queries=5, keys=4, heads=2, key_heads=None, dtype=torch.float32):
    """Query, key and value: (batch, heads, length, width)."""
    key_heads = heads if key_heads is None else key_heads
    return (
        torch.randn(2, heads, queries, 4, dtype=dtype),
        torch.randn(2, key_heads, keys, 4, dtype=dtype),
        torch.randn(2, key_heads, keys, 4, dtype=dtype),
    )


def gradients(query, key, value, is_causal=False, **kwargs):
    output, weights = resolve(ATTEND)(query, key, value, 0.0, is_causal, **kwargs)
    return torch.randn(output.shape), query, key, value, output, weights, 0.0, is_causal


def hiding(*shape):
    """A mask that hides some keys, and all of them from some queries."""
    mask = torch.where(torch.rand(shape) < 0.4, -INF, torch.randn(shape))
    mask[..., -1, :] = -INF
    return mask


@pytest.mark.parametrize("is_causal", [False, True])
def test_batch_heads_and_queries_are_cut(is_causal):
    check(ATTEND, *tensors(), 0.0, is_causal)
    check(ATTEND, *tensors(queries=2, keys=5), 0.0, is_causal)
    check(ATTEND, *tensors(), is_causal=is_causal, scale=0.3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_backward_cuts_keys_too(is_causal):
    check(BACKWARD, *gradients(*tensors(), is_causal=is_causal))
    check(BACKWARD, *gradients(*tensors(queries=2), is_causal=is_causal, scale=0.3), scale=0.3)


@pytest.mark.parametrize("shape", [(5, 4), (2, 1, 5, 4), (1, 2, 5, 4), (1, 1, 1, 4), (2, 2, 5, 1)])
def test_masks_are_broadcast(shape):
    mask = torch.randn(shape)
    check(ATTEND, *tensors(), attn_mask=mask)
    check(BACKWARD, *gradients(*tensors(), attn_mask=mask), attn_mask=mask)


def test_a_mask_and_causality():
    mask = torch.randn(5, 4)
    check(ATTEND, *tensors(), 0.0, True, attn_mask=mask)
    check(BACKWARD, *gradients(*tensors(), is_causal=True, attn_mask=mask), attn_mask=mask)


@pytest.mark.parametrize("key_heads", [1, 2, 3])
def test_heads_that_share_keys(key_heads):
    args = tensors(heads=6, key_heads=key_heads)
    check(ATTEND, *args, 0.0, True)
    check(BACKWARD, *gradients(*args))
    check(ATTEND, *args, attn_mask=torch.randn(2, 6, 5, 4))


def test_attention_in_bfloat16():
    args = tensors(dtype=torch.bfloat16)
    check(ATTEND, *args, 0.0, True, tolerance=2e-2)
    check_expansion(ATTEND, *args, cut=["-, -, -, -", "-, -, x, -", "-, -, x, -"], tolerance=2e-2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, torch.randn(5, 7), hiding(5, 7), hiding(2, 2, 5, 7), torch.randn(2, 1, 5, 1)])
def test_keys_are_cut_into_blocks(is_causal, mask):
    args = (*tensors(keys=7), 0.0, is_causal)
    masks = [] if mask is None else [", ".join("-" * mask.dim())]
    kwargs = {} if mask is None else {"attn_mask": mask}
    whole = "-, -, -, -"
    check_expansion(ATTEND, *args, **kwargs, cut=[whole, "-, -, x, -", "-, -, x, -", *masks])
    check_expansion(ATTEND, *args, **kwargs, cut=["-, -, y, -", "-, -, x, -", "-, -, x, -", *masks])
    check_expansion(ATTEND, *args, **kwargs, cut=[whole, "-, y, x, -", "-, -, x, -", *masks])


def test_blocks_of_keys_may_be_empty_and_heads_share_them():
    cut = ["-, -, -, -", "-, -, x, -", "-, -, -, -"]
    check_expansion(ATTEND, *tensors(keys=2), cut=cut)
    check_expansion(ATTEND, *tensors(heads=6, key_heads=2), scale=0.2, cut=["-, y, -, -", "-, -, x, -", "-, -, x, -"])


def test_one_query_to_many_keys_moves_one_answer_of_each_worker():
    args = tensors(queries=1, keys=400)
    cut = ["-, -, -, -", "-, -, x, -", "-, -, x, -"]
    assert check_expansion(ATTEND, *args, cut=cut) <= 20 * args[0].numel() * 4
