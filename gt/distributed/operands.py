"""The operands of a product as the user gives them: where those go that are on no worker yet, and what is asked of the
product."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gt.client.creation import layout_of
from gt.client.layouts import current_mesh, require_workers
from gt.client.session_reads import locate_copies
from gt.client.storage import TensorRef, dtype_name
from gt.client.tensor import Tensor, to_gt
from gt.core.errors import LayoutError
from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import AlgorithmRequest, Input, Move, Signature, ViewStep
from gt.distributed.product_grids import lay_out_product
from gt.sharding.lowering import NoRule
from gt.sharding.op_programs import build_op, mesh_with_most_bytes
from gt.sharding.placements import Layout, Placements
from gt.sharding.program_builder import ProgramBuilder, Register
from gt.sharding.spec import DeviceMesh, ShardingSpec, mesh_of, spec_of


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
        view = _layout_of_view(reference)
        return view if view is not None else _located(reference)

    def source(self, mesh: DeviceMesh) -> ProductSource:
        """What a product on a mesh takes. A view of a tensor on another mesh is copied before."""
        own = self.register()
        reference = self.tensor._ref if isinstance(self.tensor, Tensor) else None
        if reference is None or reference.path is None:
            return ProductSource(own, (), None if reference is None else reference.id)
        if _layout_of_view(reference) is None:
            return ProductSource(own)
        if own.spec.mesh is not mesh:
            return _copied_view(reference, reference.path.steps)
        return ProductSource(_located(reference.storage), reference.path.steps, reference.id)


def _located(reference: TensorRef) -> Register:
    own, *copies = locate_copies(reference, is_planning=True)
    return Register(reference.geometry.meta(), own, tuple(copies))


def _layout_of_view(reference: TensorRef) -> Register | None:
    """A view in the layout that it has where its storage is; None for a storage, and for a view that has none, because
    only whole tensors have such views."""
    if reference.path is None:
        return None
    base = _located(reference.storage)
    builder = ProgramBuilder(base.spec.mesh, [base])
    try:
        return builder.registers[builder.view(0, reference.path.steps)]
    except NoRule:
        return None


class OperandMove(NamedTuple):
    """A move of an operand, or of the tensor that it is a view of."""

    meta: TensorMeta
    source: ShardingSpec
    target: ShardingSpec


class ProductSource(NamedTuple):
    """The tensor that the instruction of a product names for an operand: for a view, its storage and the steps from
    there. `ident` is the id of the storage; None for a tensor of which there is no other use. To copy a view of a
    tensor on another mesh, `base_moves` are made of the tensor with the id `base`, whose copies stay, and then
    `moves`."""

    register: Register
    steps: tuple[ViewStep, ...] = ()
    ident: int | None = None
    base: int | None = None
    base_moves: tuple[OperandMove, ...] = ()
    moves: tuple[OperandMove, ...] = ()

    def without(self, other: ProductSource) -> ProductSource:
        """The source without the moves of its base that another one makes already."""
        made = other.base_moves if self.base == other.base else ()
        return self._replace(base_moves=tuple([move for move in self.base_moves if move not in made]))


def _copied_view(reference: TensorRef, steps: tuple[ViewStep, ...]) -> ProductSource:
    """The copy of a view, as the dispatcher makes it on the mesh of the view's storage."""
    base, meta = _located(reference.storage), reference.geometry.meta().dense()
    clone = Signature("aten.clone.default", (Input(0),), {}, (steps,), (), (meta,), (0,))
    builder, (result, *_), _ = build_op(clone, base.spec.mesh, [base], [None], {}, reduces_first=False)
    program, taken = builder.finish((result,), ())
    needed = [spec for _, spec in taken if spec is not None and spec not in base.copies]
    return ProductSource(
        Register(meta, builder.spec(result)),
        base=reference.storage.id,
        base_moves=tuple([OperandMove(base.meta, base.spec, spec) for spec in needed]),
        moves=tuple(
            [
                OperandMove(step.meta, spec_of(step.source), spec_of(step.target))
                for step in program.steps
                if isinstance(step, Move)
            ]
        ),
    )


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
    _require_product(a, b)
    if isinstance(out, torch.Tensor):
        raise LayoutError("out= is the layout of the product, such as 'x, -', and not a tensor to write it to")
    algorithm = _algorithm(algo, panel, mesh)
    place = mesh or current_mesh()
    is_new = [not isinstance(each, Tensor) for each in (a, b)]
    if place is None and not all(is_new) and any(is_new):  # where the other operand is
        place = ProductOperand(b if is_new[0] else a).register().spec.mesh
    if place is not None and all(is_new) and out is None and not algo:
        free = lay_out_product(tuple(a.shape), tuple(b.shape), place)
        layout = Layout(free.result.mesh, free.result)
        return ProductRequest(ProductOperand(a, free.first), ProductOperand(b, free.second), layout, None)
    first, second = [
        ProductOperand(each, _in_blocks(each, place) if new and place is not None else None)
        for each, new in zip((a, b), is_new, strict=True)
    ]
    if place is None and all(is_new):
        first = ProductOperand(first.on_gt())
        second = ProductOperand(b, _in_blocks(b, first.register().spec.mesh))
    wanted = None if out is None else layout_of(_mesh_of_layout(out, mesh, first), out)
    return ProductRequest(first, second, wanted, algorithm)


def _mesh_of_layout(out: Placements, mesh: DeviceMesh | None, first: ProductOperand) -> DeviceMesh:
    """The mesh that the user names, a spec's own, the open one, or that of the first operand."""
    own = out.mesh if isinstance(out, ShardingSpec) else current_mesh()
    return mesh or own or first.register().spec.mesh


def product_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The shape of a product. Raises torch's error if there is none."""
    if a.layout != torch.strided or b.layout != torch.strided:
        return tuple(torch.matmul(a.to("meta"), b.to("meta")).shape)  # torch's own error
    shown = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in (a, b)]
    return tuple(torch.matmul(*shown).shape)


def _require_product(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise torch's error if there is no product of these shapes and dtypes. Nothing is read for that."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, torch.Tensor):
            raise TypeError(f"matmul(): argument {name!r} must be a tensor, not {type(operand).__name__}")
    product_shape(a, b)
    if a.dtype is not b.dtype or a.dtype is torch.bool:  # only kernels refuse these
        torch.matmul(*[torch.ones([1] * each.dim(), dtype=each.dtype) for each in (a, b)])


def _algorithm(algo: str | None, panel: int, mesh: DeviceMesh | None) -> AlgorithmRequest | None:
    if algo is not None and not isinstance(algo, str):
        raise LayoutError(f"algo={algo!r} is no name of an algorithm, such as 'summa'; None leaves it to GT")
    if not isinstance(panel, int) or panel < 0:
        raise LayoutError(f"panel={panel!r}: a panel has a whole number of elements; 0 leaves it to GT")
    if mesh is not None:
        return AlgorithmRequest(algo or "", panel, require_workers(mesh).record())
    return AlgorithmRequest(algo, panel) if algo else None


def _in_blocks(tensor: torch.Tensor, mesh: DeviceMesh) -> ShardingSpec:
    """One copy: the first axis cuts the rows of matrices, the others their columns."""
    rows, columns = mesh.axis_names[:1], mesh.axis_names[1:]
    dims = [rows, columns] if tensor.dim() > 1 else [mesh.axis_names]
    return ShardingSpec(mesh, [*[()] * (tensor.dim() - len(dims)), *dims])
