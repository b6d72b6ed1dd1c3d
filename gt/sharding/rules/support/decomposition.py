"""Expansions that work out the metas of their pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Arg, DType, Input, ListArg
from gt.sharding.op_calls import Expander, Expansion, OpCall
from gt.sharding.rules.support.dims import reduced_shape
from gt.sharding.spec import Shape


def meta_of(shape: Sequence[int], dtype: str) -> TensorMeta:
    return TensorMeta(tuple(shape), contiguous_strides(tuple(shape)), 0, dtype)


class Decomposition(Expander):
    """Writes an expansion of a call: `x = p.each("aten.sub.Tensor", x, p.over("aten.mean.dim", x, dims))`."""

    def __init__(self, call: OpCall) -> None:
        super().__init__(len(call.inputs))
        self._inputs = len(call.inputs)
        self._metas = list(call.inputs)

    def call(
        self,
        op: str,
        args: Sequence[Arg],
        outputs: Sequence[TensorMeta],
        kwargs: Mapping[str, Arg] | None = None,
        places: Sequence[int] = (),
    ) -> tuple[Input, ...]:
        self._metas.extend(outputs)
        return super().call(op, args, outputs, kwargs, places)

    def shape(self, tensor: Input) -> Shape:
        return self._metas[tensor.index].shape

    def dtype(self, tensor: Input) -> str:
        return self._metas[tensor.index].dtype

    def each(self, op: str, *args: Arg, dtype: str | None = None) -> Input:
        """An op on elements at the same place; gives the dtype of its first tensor if not told."""
        tensors = [arg for arg in args if isinstance(arg, Input)]
        shape = _broadcast([self.shape(tensor) for tensor in tensors])
        return self.one(op, args, meta_of(shape, dtype or self.dtype(tensors[0])))

    def over(self, op: str, tensor: Input, dims: Sequence[int], keepdim: bool = True) -> Input:
        """A reduction of dims that gives the same dtype."""
        if not dims:
            return tensor
        shape = reduced_shape(self.shape(tensor), dims, keepdim)
        return self.one(op, (tensor, ListArg(tuple(dims)), keepdim), meta_of(shape, self.dtype(tensor)))

    def cast(self, tensor: Input, dtype: str) -> Input:
        if self.dtype(tensor) == dtype:
            return tensor
        return self.one("aten._to_copy.default", (tensor,), meta_of(self.shape(tensor), dtype), {"dtype": DType(dtype)})

    def squeeze(self, tensor: Input, dims: Sequence[int], keepdim: bool = False) -> Input:
        """Without dims of size one, unless they are to be kept."""
        if keepdim or not dims:
            return tensor
        shape = reduced_shape(self.shape(tensor), dims, keepdim=False)
        return self.one("aten.squeeze.dims", (tensor, ListArg(tuple(dims))), meta_of(shape, self.dtype(tensor)))

    def finish(self, *results: Input) -> Expansion:
        """A result that is an input becomes a tensor of its own."""
        own = [self.each("aten.clone.default", result) if result.index < self._inputs else result for result in results]
        return super().finish(*own)

    def view(self, tensor: Input, shape: Sequence[int]) -> Input:
        if self.shape(tensor) == tuple(shape):
            return tensor
        return self.one("aten.view.default", (tensor, ListArg(tuple(shape))), meta_of(shape, self.dtype(tensor)))


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple([next((size for size in sizes if size != 1), 1) for sizes in zip(*aligned, strict=True)])
