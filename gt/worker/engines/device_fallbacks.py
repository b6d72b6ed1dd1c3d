"""Ops that only torch's CPU backend has, made of ops that every device has.

The client's handles say "cpu", so torch picks CPU-only ops for them. A worker on another device runs these instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of scaled dot product attention. (B, H, L, E), (B, H, S, E), (B, H, S, V)"""
    scores = _scores(query, key, is_causal, attn_mask, scale)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return (weights @ _wide(value)).to(query.dtype), lse


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = _scores(query, key, is_causal, attn_mask, scale)
    weights = torch.exp(scores - logsumexp.unsqueeze(-1))  # (B, H, L, S)
    grad = _wide(grad_out)
    grad_value = weights.transpose(-2, -1) @ grad
    grad_weights = grad @ _wide(value).transpose(-2, -1)
    delta = (grad * _wide(out)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta) * _scale(query, scale)
    grad_query = grad_scores @ _wide(key)
    grad_key = grad_scores.transpose(-2, -1) @ _wide(query)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Half types are computed in float32, as in the CPU's kernels, and so is their log-sum-exp."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return scale if scale is not None else 1.0 / math.sqrt(query.size(-1))


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    scores = (_wide(query) @ _wide(key).transpose(-2, -1)) * _scale(query, scale)
    if is_causal:
        shape = scores.shape[-2:]
        allowed = torch.ones(shape, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores


def lstm_layer(
    input: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor,
    bias_hh: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    reverse: bool,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One direction of one LSTM layer: (outputs, last hidden, last cell, empty workspace). input: (T, B, C)"""
    steps = input.flip(0) if reverse else input
    outputs = []
    for step in steps:
        gates = torch.nn.functional.linear(step, weight_ih, bias_ih) + torch.nn.functional.linear(
            hidden, weight_hh, bias_hh
        )
        enter, forget, candidate, leave = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        outputs.append(hidden)
    stacked = torch.stack(outputs)
    workspace = torch.empty(0, dtype=torch.uint8, device=input.device)
    return stacked.flip(0) if reverse else stacked, hidden, cell, workspace


def lstm_layer_backward(
    input: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor,
    bias_hh: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    output: torch.Tensor,
    last_hidden: torch.Tensor,
    last_cell: torch.Tensor,
    grad_output: torch.Tensor | None,
    grad_hidden: torch.Tensor | None,
    grad_cell: torch.Tensor | None,
    reverse: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the seven inputs, by running the layer again in grad mode."""
    with torch.inference_mode(False), torch.enable_grad():
        given = (input, weight_ih, weight_hh, bias_ih, bias_hh, hidden, cell)
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        results = lstm_layer(*leaves, reverse)[:3]  # type: ignore[call-arg]
        pairs = [
            (r, g.clone()) for r, g in zip(results, (grad_output, grad_hidden, grad_cell), strict=True) if g is not None
        ]
        return torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs])


DEVICE_FALLBACKS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
    "aten.mkldnn_rnn_layer.default": lstm_layer,
    "aten.mkldnn_rnn_layer_backward.default": lstm_layer_backward,
}
