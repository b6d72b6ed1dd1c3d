"""`matmul` with a given layout of its result, or by a given algorithm."""

from __future__ import annotations

from typing import Any

import torch

from gt.client.tensor import Tensor
from gt.client.torch_dispatch import dispatch
from gt.distributed.operands import ProductOperand, ProductRequest, request_product
from gt.distributed.plans import plan_product
from gt.sharding.placements import OpRequest, Placements
from gt.sharding.spec import DeviceMesh


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: Placements | None = None,
    mesh: DeviceMesh | None = None,
    *,
    algo: str | None = None,
    panel: int = 0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`a @ b + bias` for tensors in any layouts, as torch.matmul. With `out` the product has that layout (on `mesh`, on
    the open mesh, or on that of `a`), by the plan that moves the fewest bytes for operands and result together. Without
    it the layout is the cheapest one. `algo` names an algorithm, which changes bytes, memory and time, and the result
    by rounding only; `panel` is the number of elements of the summed dim that "summa" and "2.5d" take at a time. Plain
    tensors are laid out on the mesh, in the best way for their product if nothing else is asked for. Gradients pass.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("tp",))
    >>> a = gt.ones(4, 8, mesh=mesh, placements="-, tp")
    >>> b = gt.ones(8, 6, mesh=mesh, placements="tp, -")
    >>> gt.distributed.matmul(a, b, out="tp, -").spec
    ShardingSpec('tp, -' on (tp=2))
    """
    request = request_product(a, b, out, mesh, algo, panel)
    if algo:
        plan_product(request)  # raises on the user's line what the dispatcher would find later
    asked = OpRequest(request.layout, request.algorithm, is_undivided=True)
    product = _Matmul.apply(*_on_the_mesh(request), asked)
    return product if bias is None else product + bias


def _on_the_mesh(request: ProductRequest) -> tuple[Tensor, Tensor]:
    """The operands; views of tensors of another mesh as copies, so that their parts are moved and not their bases."""
    operands = request.a.on_gt(), request.b.on_gt()
    if all(operand._ref.path is None for operand in operands):
        return operands
    inputs = [ProductOperand(operand).register() for operand in operands]
    mesh = request.mesh(inputs)
    first, second = [
        operand.clone() if operand._ref.path is not None and register.spec.mesh is not mesh else operand
        for operand, register in zip(operands, inputs, strict=True)
    ]
    return first, second  # type: ignore[return-value]


class _Matmul(torch.autograd.Function):
    """A product that is planned as the user asks, for autograd."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, request: OpRequest) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return dispatch(Tensor, torch.ops.aten.matmul.default, (), (a, b), None, request)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        a, b = ctx.saved_tensors
        rows, columns = _as_row(a), _as_column(b)
        full = gradient.reshape(
            *torch.broadcast_shapes(rows.shape[:-2], columns.shape[:-2]), rows.shape[-2], columns.shape[-1]
        )
        of_a = (full @ columns.mH).sum_to_size(rows.shape).reshape(a.shape) if ctx.needs_input_grad[0] else None
        of_b = (rows.mH @ full).sum_to_size(columns.shape).reshape(b.shape) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None


def _as_row(a: torch.Tensor) -> torch.Tensor:
    return a.unsqueeze(0) if a.dim() == 1 else a


def _as_column(b: torch.Tensor) -> torch.Tensor:
    return b.unsqueeze(1) if b.dim() == 1 else b
