"""GT's own shape functions, for ops whose torch functions are missing, too strict or wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gt.client.kernel_strides import run_shape_function

_ALIGNMENT = 16  # bytes: rows of the operands and of the result of a grouped product start at a multiple of it


class UnknownShape(Exception):
    """The shape function does not know the result of this call: the call becomes a query."""


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Torch's shape function accepts only bfloat16, and does not pad rows as the kernel does."""
    ranks = (left.dim(), right.dim())
    groups = None if ranks == (3, 3) else offs
    if not _is_grouped_product(left, right, offs) or bias is not None or out_dtype not in (None, left.dtype):
        raise UnknownShape
    columns = right.shape[-1]
    if ranks == (2, 2):
        assert groups is not None
        shape = [groups.shape[0], left.shape[0], columns]
    else:
        shape = [*left.shape[:-1], columns] if ranks != (3, 2) else [left.shape[1], columns]
    unit = _ALIGNMENT // left.element_size()
    row = -(-columns // unit) * unit
    strides = [shape[1] * row, row, 1] if len(shape) == 3 else [row, 1]
    return torch.empty_strided(shape, strides, dtype=left.dtype, device=left.device)


def _is_grouped_product(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None) -> bool:
    if left.dtype not in (torch.float32, torch.bfloat16, torch.float16) or right.dtype is not left.dtype:
        return False
    if left.dim() not in (2, 3) or right.dim() not in (2, 3) or left.shape[-1] != right.shape[-2]:
        return False
    if not (_is_aligned(left) and _is_aligned(right)):
        return False
    stacks = [tensor.shape[0] for tensor in (left, right) if tensor.dim() == 3]
    if len(stacks) == 2:
        return offs is None and stacks[0] == stacks[1]
    return offs is not None and offs.dim() == 1 and offs.dtype is torch.int32 and stacks in ([], [offs.shape[0]])


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Whether rows or columns are dense and start at multiples of the alignment."""
    unit = _ALIGNMENT // matrix.element_size()
    rows, columns = matrix.stride()[-2:]
    if columns == 1 and rows >= max(1, matrix.shape[-1]):
        return rows % unit == 0
    return rows == 1 and columns >= max(1, matrix.shape[-2]) and columns % unit == 0


def _group_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Torch's shape function gives all gradients the dtype of the weights, which may be wider than the input's."""
    op = torch.ops.aten.native_group_norm_backward.default
    made = run_shape_function(op, (grad_out, input, mean, rstd, weight, *rest), {})
    return (None if made[0] is None else _with_dtype(made[0], input.dtype), *made[1:])


def _optimizer_step(parameters: Sequence[torch.Tensor], *lists: Any, **options: Any) -> None:
    """A fused optimizer writes to lists of tensors with the shapes of its parameters, and returns nothing. Torch has no
    shape function for some, which would make each step a query. Some lists are empty; step counts have no dims."""
    for tensors in lists:
        if tensors and len(tensors) != len(parameters):
            raise UnknownShape
        for parameter, tensor in zip(parameters, tensors, strict=False):
            if tensor.dim() and tensor.shape != parameter.shape:
                raise UnknownShape


def _loss_like_input(name: str) -> Callable[..., torch.Tensor]:
    """Torch's shape functions promote the dtypes of the input and of the target; the kernels keep the input's."""
    op = getattr(torch.ops.aten, name).default

    def loss(self: torch.Tensor, target: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        return _with_dtype(run_shape_function(op, (self, target, *rest), options), self.dtype)

    return loss


def _gradient_like_input(name: str) -> Callable[..., torch.Tensor]:
    op = getattr(torch.ops.aten, name).default

    def gradient(
        grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, *rest: Any, **options: Any
    ) -> torch.Tensor:
        return _with_dtype(run_shape_function(op, (grad_output, self, target, *rest), options), self.dtype)

    return gradient


def _soft_margin_loss(self: torch.Tensor, target: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """As `_loss_like_input`; the kernel refuses a target that makes the result larger than the input."""
    if torch.broadcast_shapes(self.shape, target.shape) != self.shape:
        raise UnknownShape
    return _loss_like_input("soft_margin_loss")(self, target, *rest, **options)


def _multi_margin_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    """Torch's shape function gives the loss of an input without a batch a dim of one element."""
    op = torch.ops.aten.multi_margin_loss.default
    loss: torch.Tensor = run_shape_function(op, (self, target, p, margin, weight, reduction), {})
    return loss if target.dim() else loss.new_empty(())


def _multilabel_margin_loss(
    self: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `_multi_margin_loss`, with targets that are vectors."""
    op = torch.ops.aten.multilabel_margin_loss_forward.default
    loss, is_target = run_shape_function(op, (self, target, reduction), {})
    return loss if target.dim() > 1 else loss.new_empty(()), is_target


def _attention_backward(grad_out: torch.Tensor | None, *rest: Any, **options: Any) -> tuple[torch.Tensor | None, ...]:
    """Torch's shape function needs the gradient. The kernel gives no gradients if there is none, as where autograd
    comes from a result that the loss does not depend on."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return (None, None, None) if grad_out is None else run_shape_function(op, (grad_out, *rest), options)


def _with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without bytes of another dtype, with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


SHAPE_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "aten.huber_loss.default": _loss_like_input("huber_loss"),
    "aten.soft_margin_loss.default": _soft_margin_loss,
    "aten.multi_margin_loss.default": _multi_margin_loss,
    "aten.multilabel_margin_loss_forward.default": _multilabel_margin_loss,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    **{
        f"aten.{name}.default": _gradient_like_input(name)
        for name in ("mse_loss_backward", "smooth_l1_loss_backward", "soft_margin_loss_backward")
    },
    "aten._grouped_mm.default": _grouped_mm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    **{
        f"aten._fused_{name}_.{overload}": _optimizer_step
        for name in ("adagrad", "adam", "adamw", "sgd")
        for overload in ("default", "tensor_lr")
    },
}
