"""The operands of a product as the user gives them: where those go that are on no worker yet, and what is asked of the
product."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gt.client.creation import layout_of
from gt.client.geometry import dtype_name
from gt.client.open_meshes import current_mesh
from gt.client.session_reads import locate_copies
from gt.client.tensor import Tensor, to_gt
from gt.core.errors import LayoutError
from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import AlgorithmRequest
from gt.sharding.op_programs import mesh_with_most_bytes
from gt.sharding.placements import Layout, Placements, require_mesh
from gt.sharding.product_grids import lay_out_product
from gt.sharding.program_builder import Register
from gt.sharding.spec import DeviceMesh, ShardingSpec, mesh_of


class ProductOperand(NamedTuple):
    """A tensor, and the layout that it gets if it is on no worker yet."""

    tensor: torch.Tensor
    layout: ShardingSpec | None = None

    def on_gt(self) -> Tensor:
        return to_gt(self.tensor) if isinstance(self.tensor, Tensor) else to_gt(self.tensor, self.layout)

    def register(self) -> Register:
        """The operand as the dispatcher knows it, or will know it. Only one without a layout is uploaded for that."""
        if not isinstance(self.tensor, Tensor) and self.layout is not None:
            shape = tuple(self.tensor.shape)
            meta = TensorMeta(shape, contiguous_strides(shape), 0, dtype_name(self.tensor.dtype))
            return Register(meta, self.layout.normal(shape))
        reference = self.on_gt()._ref
        own, *copies = locate_copies(reference)
        return Register(reference.geometry.meta(), own, tuple(copies))


class ProductRequest(NamedTuple):
    """A product as the user asks for it: `layout` of the result, or None for the cheapest; and an algorithm."""

    a: ProductOperand
    b: ProductOperand
    layout: Layout | None
    algorithm: AlgorithmRequest | None

    def mesh(self, inputs: list[Register]) -> DeviceMesh:
        """The mesh on which the product runs."""
        if self.layout is not None:
            return self.layout.mesh
        if self.algorithm is not None and self.algorithm.mesh is not None:
            return mesh_of(self.algorithm.mesh)
        mesh = mesh_with_most_bytes(inputs)
        assert mesh is not None, "there are two inputs"
        return mesh


def request_product(
    a: torch.Tensor, b: torch.Tensor, out: Placements | None, mesh: DeviceMesh | None, algo: str | None, panel: int
) -> ProductRequest:
    """Operands that are on no worker yet are laid out on the mesh, or on the open one. If both are, and neither a
    layout nor an algorithm is asked for, they get the layouts in which their product moves the fewest bytes; otherwise
    blocks of equal size."""
    torch.matmul(a.to("meta"), b.to("meta"))  # raises torch's error if the shapes do not fit
    algorithm = _algorithm(algo, panel, mesh)
    place = mesh or current_mesh()
    is_new = [not isinstance(each, Tensor) for each in (a, b)]
    if place is not None and all(is_new) and out is None and not algo:
        free = lay_out_product(tuple(a.shape), tuple(b.shape), place)
        layout = Layout(free.result.mesh, free.result)
        return ProductRequest(ProductOperand(a, free.first), ProductOperand(b, free.second), layout, None)
    first, second = [
        ProductOperand(each, _in_blocks(each, place) if new and place is not None else None)
        for each, new in zip((a, b), is_new, strict=True)
    ]
    if place is None:
        first = ProductOperand(first.on_gt())
    wanted = None if out is None else layout_of(place or first.register().spec.mesh, out)
    return ProductRequest(first, second, wanted, algorithm)


def _algorithm(algo: str | None, panel: int, mesh: DeviceMesh | None) -> AlgorithmRequest | None:
    if panel < 0:
        raise LayoutError(f"panel={panel}: a panel has at least one element; 0 leaves it to GT")
    if mesh is not None:
        return AlgorithmRequest(algo or "", panel, require_mesh(mesh).record())
    return AlgorithmRequest(algo, panel) if algo else None


def _in_blocks(tensor: torch.Tensor, mesh: DeviceMesh) -> ShardingSpec:
    """One copy: the first axis cuts the rows of matrices, the others their columns."""
    rows, columns = mesh.axis_names[:1], mesh.axis_names[1:]
    dims = [rows, columns] if tensor.dim() > 1 else [mesh.axis_names]
    return ShardingSpec(mesh, [*[()] * (tensor.dim() - len(dims)), *dims])
