"""Builds expansions: an op as several calls on whole tensors, with the shapes and dtypes of their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Arg, DType, Input, ListArg
from gt.sharding.boxes import Shape
from gt.sharding.op_calls import ExpandedCall, Expansion, OpCall
from gt.sharding.rules.support.dims import broadcast_shape, reduced_shape


def contiguous_meta(shape: Sequence[int], dtype: str) -> TensorMeta:
    return TensorMeta(tuple(shape), contiguous_strides(tuple(shape)), 0, dtype)


class ExpansionBuilder:
    """Builds an expansion of a call: `y = e.pointwise("aten.sub.Tensor", x, e.reduce("aten.mean.dim", x, dims))`."""

    def __init__(self, call: OpCall) -> None:
        self._inputs = len(call.inputs)
        self._metas = list(call.inputs)
        self._calls: list[ExpandedCall] = []

    def call_multi(
        self,
        op: str,
        args: Sequence[Arg],
        outputs: Sequence[TensorMeta],
        kwargs: Mapping[str, Arg] | None = None,
        output_positions: Sequence[int] = (),
    ) -> tuple[Input, ...]:
        """One call with several outputs."""
        self._calls.append(ExpandedCall(op, tuple(args), kwargs or {}, tuple(outputs), tuple(output_positions)))
        first = len(self._metas)
        self._metas.extend(outputs)
        return tuple([Input(first + position) for position in range(len(outputs))])

    def call(self, op: str, args: Sequence[Arg], output: TensorMeta, kwargs: Mapping[str, Arg] | None = None) -> Input:
        """A call with one output."""
        return self.call_multi(op, args, (output,), kwargs)[0]

    def shape(self, tensor: Input) -> Shape:
        return self._metas[tensor.index].shape

    def dtype(self, tensor: Input) -> str:
        return self._metas[tensor.index].dtype

    def pointwise(self, op: str, *args: Arg, dtype: str | None = None) -> Input:
        """A pointwise op with broadcasting. Its result has the dtype of its first tensor unless one is given."""
        tensors = [arg for arg in args if isinstance(arg, Input)]
        shape = broadcast_shape([self.shape(tensor) for tensor in tensors])
        return self.call(op, args, contiguous_meta(shape, dtype or self.dtype(tensors[0])))

    def reduce(self, op: str, tensor: Input, dims: Sequence[int], keepdim: bool = True) -> Input:
        """A reduction of dims with a result of the same dtype."""
        if not dims:
            return tensor
        shape = reduced_shape(self.shape(tensor), dims, keepdim)
        meta = contiguous_meta(shape, self.dtype(tensor))
        return self.call(op, (tensor, ListArg(tuple(dims)), keepdim), meta)

    def cast(self, tensor: Input, dtype: str) -> Input:
        if self.dtype(tensor) == dtype:
            return tensor
        meta = contiguous_meta(self.shape(tensor), dtype)
        return self.call("aten._to_copy.default", (tensor,), meta, {"dtype": DType(dtype)})

    def squeeze(self, tensor: Input, dims: Sequence[int], keepdim: bool = False) -> Input:
        """The tensor without these dims of size one, unless `keepdim`."""
        if keepdim or not dims:
            return tensor
        meta = contiguous_meta(reduced_shape(self.shape(tensor), dims, keepdim=False), self.dtype(tensor))
        return self.call("aten.squeeze.dims", (tensor, ListArg(tuple(dims))), meta)

    def view(self, tensor: Input, shape: Sequence[int]) -> Input:
        if self.shape(tensor) == tuple(shape):
            return tensor
        meta = contiguous_meta(shape, self.dtype(tensor))
        return self.call("aten.view.default", (tensor, ListArg(tuple(shape))), meta)

    def finish(self, *results: Input) -> Expansion:
        """The expansion. A result that is an input of the call is cloned."""
        own = [
            self.pointwise("aten.clone.default", result) if result.index < self._inputs else result
            for result in results
        ]
        return Expansion(tuple(self._calls), tuple([result.index for result in own]))
