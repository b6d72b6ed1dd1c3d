"""`matmul` with a given layout of its result."""

from __future__ import annotations

from typing import Any

import torch

from gt.client.creation import layout_of
from gt.client.tensor import Tensor, to_gt
from gt.client.torch_dispatch import dispatch
from gt.sharding.placements import Layout, Placements
from gt.sharding.spec import DeviceMesh

_PRODUCTS = {2: torch.ops.aten.mm.default, 3: torch.ops.aten.bmm.default}


def matmul(
    a: torch.Tensor, b: torch.Tensor, out: Placements | None = None, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """`a @ b` for tensors in any layouts. With `out` the product has that layout (on `mesh`, or that of `a`), by the
    plan that moves the fewest bytes for operands and result together. Without it the layout is the cheapest one.
    Gradients pass."""
    a, b = to_gt(a), to_gt(b)
    if out is None:
        return torch.matmul(a, b)
    layout = layout_of(mesh or a.spec.mesh, out)
    assert layout is not None
    if a.dim() == b.dim() and a.dim() in _PRODUCTS and a.shape[:-2] == b.shape[:-2]:
        return _MatmulWithLayout.apply(a, b, layout)  # type: ignore[no-any-return]
    product = torch.matmul(a, b)
    assert isinstance(product, Tensor)
    return product.redistribute(layout.mesh, layout.placements)


class _MatmulWithLayout(torch.autograd.Function):
    """A product in a given layout, for autograd."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, layout: Layout) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return dispatch(Tensor, _PRODUCTS[a.dim()], (), (a, b), None, layout)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        a, b = ctx.saved_tensors
        of_a = gradient @ b.mH if ctx.needs_input_grad[0] else None
        of_b = a.mH @ gradient if ctx.needs_input_grad[1] else None
        return of_a, of_b, None
