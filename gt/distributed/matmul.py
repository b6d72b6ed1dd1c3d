"""`matmul` with a given layout of its result, or by a given algorithm."""

from __future__ import annotations

from typing import Any

import torch

from gt.client.tensor import Tensor
from gt.client.torch_dispatch import dispatch
from gt.client.torch_patches.dispatch import is_transformed
from gt.core.signatures import AlgorithmRequest
from gt.core.tracebacks import ends_on_users_line
from gt.distributed.operands import ProductOperand, ProductRequest, request_product
from gt.distributed.plans import plan_product
from gt.sharding.placements import OpRequest, Placements
from gt.sharding.spec import DeviceMesh


@ends_on_users_line
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
    Inside transforms of torch.func and forward-mode AD it is torch.matmul, in any layout.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("tp",))
    >>> a = gt.ones(4, 8, mesh=mesh, placements="-, tp")
    >>> b = gt.ones(8, 6, mesh=mesh, placements="tp, -")
    >>> gt.distributed.matmul(a, b, out="tp, -").spec
    ShardingSpec('tp, -' on (tp=2))
    """
    if is_transformed():  # tensors are wrapped, and only torch knows how
        product = torch.matmul(a, b)
        return product if bias is None else product + bias
    request = request_product(_as_autocast(a), _as_autocast(b), out, mesh, algo, panel)
    if algo:
        plan_product(request)  # raises on the user's line what the dispatcher would find later
    first, second, algorithm = _on_the_mesh(request)
    product = _Matmul.apply(first, second, OpRequest(request.layout, algorithm, is_undivided=True))
    return product if bias is None else product + bias


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """An operand in the dtype that autocast gives to those of torch.matmul."""
    is_cast = isinstance(x, torch.Tensor) and torch.is_autocast_enabled("cpu") and x.is_floating_point()
    return x.to(torch.get_autocast_dtype("cpu")) if is_cast and x.dtype is not torch.float64 else x


def _on_the_mesh(request: ProductRequest) -> tuple[Tensor, Tensor, AlgorithmRequest | None]:
    """The operands; views of tensors of another mesh as copies, so that their parts are moved and not their bases. And
    the algorithm, which names the mesh if that is not the one with the most bytes of the tensors in the instruction."""
    operands, algorithm = [request.a.on_gt(), request.b.on_gt()], request.algorithm
    if all(operand._ref.path is None for operand in operands):
        return operands[0], operands[1], algorithm
    inputs = [ProductOperand(operand).register() for operand in operands]
    mesh = request.mesh(inputs)
    for position, (operand, register) in enumerate(zip(operands, inputs, strict=True)):
        if operand._ref.path is not None and register.spec.mesh is not mesh:
            operands[position] = operand.clone()  # type: ignore[assignment]
        else:
            inputs[position] = register._replace(meta=operand._ref.storage.geometry.meta())
    if request.mesh(inputs) is not mesh:
        name, panel = (algorithm.name, algorithm.panel) if algorithm is not None else ("", 0)
        algorithm = AlgorithmRequest(name, panel, mesh.record())
    return operands[0], operands[1], algorithm


class _Matmul(torch.autograd.Function):
    """A product that is planned as the user asks, for autograd. Those of its backward are planned like it."""

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
        of_a = _summed(full, columns.mH, rows.shape).reshape(a.shape) if ctx.needs_input_grad[0] else None
        of_b = _summed(rows.mH, full, columns.shape).reshape(b.shape) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None


def _summed(left: torch.Tensor, right: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The product `left @ right`, summed over the batch dims that `shape` lacks. The sum of all products of a batch is
    one op, which does not hold them all at once; but not for 16-bit floats, since it would round each sum of two."""
    is_summed = len(shape) == 2 and left.dim() == right.dim() == 3
    if is_summed and left.dtype not in (torch.bfloat16, torch.float16):
        return torch.addbmm(left.new_zeros(()), left, right, beta=0)
    product: torch.Tensor = _Matmul.apply(left, right, OpRequest(is_undivided=True))
    return product.sum_to_size(shape)


def _as_row(a: torch.Tensor) -> torch.Tensor:
    return a.unsqueeze(0) if a.dim() == 1 else a


def _as_column(b: torch.Tensor) -> torch.Tensor:
    return b.unsqueeze(1) if b.dim() == 1 else b
