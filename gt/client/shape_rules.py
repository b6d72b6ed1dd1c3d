"""Closed forms of the shapes and strides of results, for the ops that most programs consist of.

A rule computes with the geometries of its tensors in some microseconds, where torch's shape function takes some
hundred. It gives exactly torch's result, or None where it does not know: for shapes that do not fit, for operands that
are not row-major in most rules, and for empty tensors. `rule_inference.py` says when a rule is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from gt.client.geometry import Geometry
from gt.client.kernel_strides import has_own_strides
from gt.client.tensor_iterator import Ints, broadcast, iterated_strides, view_strides
from gt.client.torch_patches.op_registry import OpOverload, schema_of
from gt.core.meta import contiguous_strides, is_dense


class Strided(NamedTuple):
    """The shape and strides of a result, and the offset of a view in its storage."""

    shape: Ints
    stride: Ints
    offset: int = 0


Results: TypeAlias = Sequence[Strided | None] | None
"""The results of an op, None in place of one that it does not give; None if the rule does not know."""


class ShapeRule(NamedTuple):
    """`apply` takes the arguments of a call, with geometries in place of tensors. With `takes_sizes` it holds for any
    integers among the constants of the call, such as the sizes of a view; otherwise constants belong to the family."""

    apply: Callable[..., Results]
    takes_sizes: bool = False


def rule_of(func: OpOverload) -> ShapeRule | None:
    rule = _RULES.get(str(func))
    if rule is not None or torch.Tag.pointwise not in func.tags:
        return rule
    is_plain = not schema_of(func).is_mutable and len(schema_of(func).returns) == 1 and str(func) not in _BY_VALUE
    return ShapeRule(_iterated) if is_plain and not has_own_strides(func) else None


def _rows(shape: Sequence[int]) -> Strided:
    """A row-major result."""
    shape = tuple(shape)
    return Strided(shape, contiguous_strides(shape))


def _is_row_major(*tensors: Geometry | None) -> bool:
    """Whether tensors are row-major and have elements."""
    return all(t is None or (t.stride == t.row_major and 0 not in t.shape) for t in tensors)


def _fits(tensor: Geometry | None, shape: Sequence[int]) -> bool:
    return tensor is None or tuple(tensor.shape) == tuple(shape)


# Pointwise ops


def _iterated(*args: Any, **kwargs: Any) -> Results:
    operands = [value for value in (*args, *kwargs.values()) if type(value) is Geometry]
    if not 0 < len(operands) <= _MAX_OPERANDS or any(0 in operand.shape for operand in operands):
        return None
    dtype = operands[0].dtype
    if any(operand.dtype is not dtype for operand in operands) and not all(map(_is_dense, operands)):
        return None  # operands of other dtypes are copied first, without their gaps
    shape = broadcast([operand.shape for operand in operands])
    if shape is None:
        return None
    strided = [(operand.shape, operand.stride) for operand in operands]
    stride = iterated_strides(shape, strided)
    if any(type(value) in _NUMBERS for value in args) and iterated_strides(shape, [*strided, ((), ())]) != stride:
        return None  # some ops make a tensor of a number, over which they iterate too
    return [Strided(shape, stride)]


_MAX_OPERANDS = 3  # as in kernel_strides.py
_NUMBERS = frozenset((bool, int, float, complex))
_BY_VALUE = ("aten.pow.Scalar",)  # its strides depend on the number


def _is_dense(tensor: Geometry) -> bool:
    return tensor.stride == tensor.row_major or is_dense(tensor.shape, tensor.stride)


def _copied(tensor: Geometry, *_: Any, memory_format: torch.memory_format | None = None, **__: Any) -> Results:
    """`clone`, `zeros_like`: a result with the strides of a tensor without gaps."""
    if 0 in tensor.shape or not _is_dense(tensor):
        return None
    if memory_format is torch.contiguous_format:
        return [_rows(tensor.shape)]
    if memory_format not in (None, torch.preserve_format):
        return None
    return [Strided(tuple(tensor.shape), tensor.stride)]


def _same_rows(tensor: Geometry, *_: Any, **__: Any) -> Results:
    return [_rows(tensor.shape)] if _is_row_major(tensor) else None


def _new_rows(*tensors: Any, **_: Any) -> Results:
    """Tensors of one shape, in any memory order, give a row-major one."""
    shapes = [tensor.shape for tensor in tensors if type(tensor) is Geometry]
    return [_rows(shapes[0])] if 0 not in shapes[0] and all(shape == shapes[0] for shape in shapes) else None


def _like_both(left: Geometry, right: Geometry, *_: Any, **__: Any) -> Results:
    """Two row-major tensors of one shape give a third."""
    return [_rows(left.shape)] if _is_row_major(left, right) and left.shape == right.shape else None


def _masked(tensor: Geometry, mask: Geometry, *_: Any) -> Results:
    fits = broadcast([tensor.shape, mask.shape]) == tuple(tensor.shape)
    return [_rows(tensor.shape)] if fits and _is_row_major(tensor, mask) else None


def _dropout(tensor: Geometry, *_: Any) -> Results:
    return [_rows(tensor.shape)] * 2 if _is_row_major(tensor) else None


# Products


def _mm(left: Geometry, right: Geometry) -> Results:
    if len(left.shape) != 2 or len(right.shape) != 2 or left.shape[1] != right.shape[0]:
        return None
    return [_rows((left.shape[0], right.shape[1]))]


def _bmm(left: Geometry, right: Geometry) -> Results:
    if len(left.shape) != 3 or len(right.shape) != 3 or left.shape[0] != right.shape[0]:
        return None
    return [_rows((*left.shape[:2], right.shape[2]))] if left.shape[2] == right.shape[1] else None


def _added(product: Callable[[Geometry, Geometry], Results]) -> Callable[..., Results]:
    def rule(addend: Geometry, left: Geometry, right: Geometry, **_: Any) -> Results:
        found = product(left, right)
        if found is None or found[0] is None or broadcast([addend.shape, found[0].shape]) != found[0].shape:
            return None
        return found

    return rule


def _attention(query: Geometry, key: Geometry, value: Geometry, *_: Any, **__: Any) -> Results:
    if not _is_attention(query, key, value):
        return None
    batch, heads, length, _ = query.shape
    if query.stride not in (query.row_major, _by_head(query.shape).stride):
        return None
    return [Strided(tuple(query.shape), query.stride), Strided((batch, heads, length), (length * heads, 1, heads))]


def _attention_backward(
    gradient: Geometry, query: Geometry, key: Geometry, value: Geometry, out: Geometry, *_: Any, **__: Any
) -> Results:
    if not _is_attention(query, key, value) or gradient.shape != query.shape or out.shape != query.shape:
        return None
    return [_by_head(operand.shape) for operand in (query, key, value)]


def _is_attention(query: Geometry, key: Geometry, value: Geometry) -> bool:
    if len(query.shape) != 4 or key.shape != value.shape or len(key.shape) != 4 or 0 in (*query.shape, *key.shape):
        return False
    return query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3]


def _by_head(shape: Sequence[int]) -> Strided:
    """(batch, heads, length, width) in memory of (batch, length, heads, width)."""
    batch, heads, length, width = shape
    return Strided((batch, heads, length, width), (length * heads * width, width, heads * width, 1))


# Reductions, norms and losses


def _dims(dims: int | Sequence[int] | None, rank: int) -> set[int] | None:
    """The dims that an argument means; None for a dim that is not there. No dims at all mean every dim."""
    given = [dims] if isinstance(dims, int) else list(dims or range(rank))
    found = {dim % rank for dim in given if rank and -rank <= dim < rank}
    return found if len(found) == len(given) else None


def _reduced(tensor: Geometry, dims: Any = None, keepdim: bool = False, **_: Any) -> Results:
    found = _dims(dims, len(tensor.shape))
    if found is None or 0 in tensor.shape:
        return None
    sizes = [1 if dim in found else size for dim, size in enumerate(tensor.shape) if keepdim or dim not in found]
    return [_rows(sizes)]


def _reduced_to_number(tensor: Geometry, **_: Any) -> Results:
    return None if 0 in tensor.shape else [_rows(())]


def _layer_norm(
    tensor: Geometry, normalized: Sequence[int], weight: Geometry | None, bias: Geometry | None, eps: float
) -> Results:
    outer = len(tensor.shape) - len(normalized)
    fits = outer >= 0 and tuple(tensor.shape[outer:]) == tuple(normalized)
    if not (fits and _fits(weight, normalized) and _fits(bias, normalized) and _is_row_major(tensor, weight, bias)):
        return None
    statistics = _rows((*tensor.shape[:outer], *[1] * len(normalized)))
    return [_rows(tensor.shape), statistics, statistics]


def _layer_norm_backward(
    gradient: Geometry,
    tensor: Geometry,
    normalized: Sequence[int],
    mean: Geometry,
    rstd: Geometry,
    weight: Geometry | None,
    bias: Geometry | None,
    mask: Sequence[bool],
) -> Results:
    operands = (gradient, tensor, mean, rstd, weight, bias)
    forward = _layer_norm(tensor, normalized, weight, bias, 0.0)
    if forward is None or gradient.shape != tensor.shape or not _is_row_major(*operands) or weight is None:
        return None
    statistics = forward[1]
    if statistics is None or not (_fits(mean, statistics.shape) and _fits(rstd, statistics.shape)):
        return None
    shapes = (tensor.shape, normalized, normalized)
    return [_rows(shape) if asked else None for shape, asked in zip(shapes, mask, strict=True)]


def _nll_loss(
    tensor: Geometry, target: Geometry, weight: Geometry | None, reduction: int, ignore_index: int
) -> Results:
    if not _is_loss_of_classes(tensor, target, weight):
        return None
    return [_rows(() if reduction else target.shape), _rows(())]


def _nll_loss_backward(
    gradient: Geometry,
    tensor: Geometry,
    target: Geometry,
    weight: Geometry | None,
    reduction: int,
    ignore_index: int,
    total_weight: Geometry,
) -> Results:
    fits = _fits(gradient, () if reduction else target.shape) and _fits(total_weight, ())
    return [_rows(tensor.shape)] if fits and _is_loss_of_classes(tensor, target, weight) else None


def _is_loss_of_classes(tensor: Geometry, target: Geometry, weight: Geometry | None) -> bool:
    if len(tensor.shape) != 2 or not _is_row_major(tensor, target, weight):
        return False
    return _fits(target, tensor.shape[:1]) and _fits(weight, tensor.shape[1:])


def _reduced_loss(tensor: Geometry, target: Geometry, reduction: int = 1) -> Results:
    if tensor.shape != target.shape or not reduction or not _is_row_major(tensor, target):
        return None
    return [_rows(())]


def _loss_gradient(gradient: Geometry, tensor: Geometry, target: Geometry, reduction: int) -> Results:
    if not reduction or gradient.shape or not _is_row_major(tensor, target) or tensor.shape != target.shape:
        return None
    return [_rows(tensor.shape)]


# Tables and parts


def _embedding(weight: Geometry, indices: Geometry, *_: Any) -> Results:
    if len(weight.shape) != 2 or not _is_row_major(weight, indices):
        return None
    return [_rows((*indices.shape, weight.shape[1]))]


def _embedding_backward(gradient: Geometry, indices: Geometry, rows: int, *_: Any) -> Results:
    if not gradient.shape or gradient.shape[:-1] != indices.shape or not _is_row_major(gradient, indices):
        return None
    return [_rows((rows, gradient.shape[-1]))]


def _gathered(tensor: Geometry, dim: int, index: Geometry, **_: Any) -> Results:
    rank = len(tensor.shape)
    if not rank or rank != len(index.shape) or not -rank <= dim < rank or not _is_row_major(tensor, index):
        return None
    pairs = enumerate(zip(tensor.shape, index.shape, strict=True))
    return [_rows(index.shape)] if all(at == dim % rank or size >= own for at, (size, own) in pairs) else None


def _indexed(tensor: Geometry, dim: int, index: Geometry) -> Results:
    rank = len(tensor.shape)
    if len(index.shape) != 1 or not -rank <= dim < rank or not _is_row_major(tensor, index):
        return None
    return [_rows([index.shape[0] if at == dim % rank else size for at, size in enumerate(tensor.shape)])]


def _concatenated(tensors: Sequence[Geometry], dim: int = 0) -> Results:
    rank = len(tensors[0].shape)
    # images may have a memory format that is ambiguous
    if not 0 < rank <= _MAX_ROWS or not -rank <= dim < rank or not _is_row_major(*tensors):
        return None
    at = dim % rank
    others = {(*tensor.shape[:at], *tensor.shape[at + 1 :]) for tensor in tensors}
    if len(others) > 1 or any(len(tensor.shape) != rank for tensor in tensors):
        return None
    length = sum(tensor.shape[at] for tensor in tensors)
    return [_rows((*tensors[0].shape[:at], length, *tensors[0].shape[at + 1 :]))]


def _stacked(tensors: Sequence[Geometry], dim: int = 0) -> Results:
    shape, rank = tensors[0].shape, len(tensors[0].shape) + 1
    if rank > _MAX_ROWS or not -rank <= dim < rank or not _is_row_major(*tensors):
        return None
    if any(tensor.shape != shape for tensor in tensors):
        return None
    return [_rows((*shape[: dim % rank], len(tensors), *shape[dim % rank :]))]


_MAX_ROWS = 3


# New tensors


def _created(size: Sequence[int], *_: Any, memory_format: torch.memory_format | None = None, **__: Any) -> Results:
    return [_rows(size)] if memory_format is None and all(count > 0 for count in size) else None


def _created_like(tensor: Geometry, size: Sequence[int], *_: Any, **__: Any) -> Results:
    return _created(size)


def _counted(start: Any, end: Any, step: Any = 1, **_: Any) -> Results:
    """`arange` of integers."""
    if not type(start) is type(end) is type(step) is int or step <= 0 or end <= start:
        return None
    return [_rows((-(-(end - start) // step),))]


def _slice_backward(gradient: Geometry, size: Sequence[int], dim: int, start: int, end: int, step: int) -> Results:
    found = _sliced_sizes(size, dim, start, end, step)
    if found is None or 0 in size or not _is_row_major(gradient):
        return None
    return [_rows(size)] if _fits(gradient, found[0]) else None


def _select_backward(gradient: Geometry, size: Sequence[int], dim: int, index: int) -> Results:
    rank = len(size)
    if not -rank <= dim < rank or not -size[dim] <= index < size[dim] or not _is_row_major(gradient):
        return None
    rest = [count for at, count in enumerate(size) if at != dim % rank]
    return [_rows(size)] if _fits(gradient, rest) else None


# Views


def _viewed(tensor: Geometry, size: Sequence[int]) -> Results:
    shape = _sizes_of_view(tensor.shape, size)
    if shape is None:
        return None
    if tensor.stride == tensor.row_major:
        return [Strided(shape, contiguous_strides(shape), tensor.offset)]
    stride = view_strides(tuple(tensor.shape), tensor.stride, shape)
    return None if stride is None else [Strided(shape, stride, tensor.offset)]


def _unsafe_viewed(tensor: Geometry, size: Sequence[int]) -> Results:
    shape = _sizes_of_view(tensor.shape, size)
    return None if shape is None or not _is_row_major(tensor) else [_rows(shape)]


def _sizes_of_view(shape: Sequence[int], size: Sequence[int]) -> Ints | None:
    """The sizes of a view, with the one that is given as -1; None for those that do not fit, and for no elements."""
    count, known = math.prod(shape), math.prod([number for number in size if number != -1])
    if count == 0 or known <= 0 or list(size).count(-1) > 1 or min(size, default=1) < -1 or count % known:
        return None
    found = tuple([count // known if number == -1 else number for number in size])
    return found if math.prod(found) == count else None


def _transposed(tensor: Geometry, first: int = 0, second: int = 1) -> Results:
    rank = len(tensor.shape)
    if not (-rank <= first < rank and -rank <= second < rank):
        return None
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return _permuted(tensor, order)


def _transposed_matrix(tensor: Geometry) -> Results:
    return _transposed(tensor) if len(tensor.shape) == 2 else None


def _permuted(tensor: Geometry, order: Sequence[int]) -> Results:
    rank = len(tensor.shape)
    if sorted([dim % rank for dim in order if -rank <= dim < rank]) != list(range(rank)) or len(order) != rank:
        return None
    shape, stride = tensor.shape, tensor.stride
    return [Strided(tuple([shape[dim] for dim in order]), tuple([stride[dim] for dim in order]), tensor.offset)]


def _unsqueezed(tensor: Geometry, dim: int) -> Results:
    rank = len(tensor.shape)
    if not -rank - 1 <= dim <= rank:
        return None
    at, shape, stride = dim % (rank + 1), tuple(tensor.shape), tensor.stride
    step = 1 if at == rank else shape[at] * stride[at]
    return [Strided((*shape[:at], 1, *shape[at:]), (*stride[:at], step, *stride[at:]), tensor.offset)]


def _squeezed(tensor: Geometry, dims: int | Sequence[int] | None = None) -> Results:
    found = None if dims in ([], ()) else _dims(dims, len(tensor.shape))
    if found is None:
        return None
    kept = [dim for dim, size in enumerate(tensor.shape) if size != 1 or dim not in found]
    shape, stride = tensor.shape, tensor.stride
    return [Strided(tuple([shape[dim] for dim in kept]), tuple([stride[dim] for dim in kept]), tensor.offset)]


def _expanded(tensor: Geometry, size: Sequence[int], *, implicit: bool = False) -> Results:
    new = len(size) - len(tensor.shape)
    if new < 0:
        return None
    shape, stride = [0] * len(size), [0] * len(size)
    for dim in reversed(range(len(size))):
        own, wanted = tensor.shape[dim - new] if dim >= new else 1, size[dim]
        if dim >= new:
            step = tensor.stride[dim - new]
        else:
            step = shape[dim + 1] * stride[dim + 1] if dim + 1 < len(size) else 1
        if wanted == -1 and dim >= new:
            wanted = own
        if wanted < 0 or own not in (1, wanted):
            return None
        shape[dim], stride[dim] = wanted, step if wanted == own else 0
    return [Strided(tuple(shape), tuple(stride), tensor.offset)]


def _sliced(tensor: Geometry, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Results:
    found = _sliced_sizes(tensor.shape, dim, start, end, step)
    if found is None:
        return None
    shape, first = found
    at = dim % len(shape)
    stride = tuple([own * step if number == at else own for number, own in enumerate(tensor.stride)])
    return [Strided(shape, stride, tensor.offset + first * tensor.stride[at])]


def _sliced_sizes(
    shape: Sequence[int], dim: int, start: int | None, end: int | None, step: int
) -> tuple[Ints, int] | None:
    """The shape of a slice, and where it starts along its dim."""
    rank = len(shape)
    if not -rank <= dim < rank or step <= 0:
        return None
    size = shape[dim]
    first = 0 if start is None else start + size if start < 0 else start
    last = size if end is None else end + size if end < 0 else end
    first = min(max(first, 0), size)
    last = min(max(last, first), size)
    count = (last - first + step - 1) // step
    return tuple([count if at == dim % rank else own for at, own in enumerate(shape)]), first


def _selected(tensor: Geometry, dim: int, index: int) -> Results:
    rank = len(tensor.shape)
    if not -rank <= dim < rank or not -tensor.shape[dim] <= index < tensor.shape[dim]:
        return None
    return [_picked(tensor, dim % rank, index % tensor.shape[dim])]


def _picked(tensor: Geometry, at: int, index: int) -> Strided:
    shape, stride = tuple(tensor.shape), tensor.stride
    offset = tensor.offset + index * stride[at]
    return Strided((*shape[:at], *shape[at + 1 :]), (*stride[:at], *stride[at + 1 :]), offset)


def _unbound(tensor: Geometry, dim: int = 0) -> Results:
    rank = len(tensor.shape)
    if not -rank <= dim < rank or not tensor.shape[dim]:
        return None
    return [_picked(tensor, dim % rank, index) for index in range(tensor.shape[dim])]


def _split(tensor: Geometry, size: int, dim: int = 0) -> Results:
    rank = len(tensor.shape)
    if not -rank <= dim < rank or size <= 0 or not tensor.shape[dim]:
        return None
    length = tensor.shape[dim]
    return _split_by(tensor, [min(size, length - start) for start in range(0, length, size)], dim)


def _split_by(tensor: Geometry, sizes: Sequence[int], dim: int = 0) -> Results:
    rank = len(tensor.shape)
    if not -rank <= dim < rank or min(sizes, default=-1) < 0 or sum(sizes) != tensor.shape[dim]:
        return None
    at, first, parts = dim % rank, 0, []
    for size in sizes:
        shape = (*tensor.shape[:at], size, *tensor.shape[at + 1 :])
        parts.append(Strided(shape, tensor.stride, tensor.offset + first * tensor.stride[at]))
        first += size
    return parts


def _aliased(tensor: Geometry) -> Results:
    return [Strided(tuple(tensor.shape), tensor.stride, tensor.offset)]


_RULES: Mapping[str, ShapeRule] = {
    f"aten.{name}": rule
    for rule, names in (
        (ShapeRule(_copied), ("clone.default", "_to_copy.default", "empty_like.default", "zeros_like.default",
                              "ones_like.default", "full_like.default", "rand_like.default", "randn_like.default")),
        (ShapeRule(_new_rows), ("_softmax.default", "_log_softmax.default", "_softmax_backward_data.default",
                                "_log_softmax_backward_data.default")),
        (ShapeRule(_same_rows), ("cumsum.default", "tril.default", "triu.default")),
        (ShapeRule(_like_both), ("native_dropout_backward.default",)),
        (ShapeRule(_masked), ("masked_fill.Scalar", "masked_fill.Tensor")),
        (ShapeRule(_dropout), ("native_dropout.default",)),
        (ShapeRule(_mm), ("mm.default",)),
        (ShapeRule(_bmm), ("bmm.default",)),
        (ShapeRule(_added(_mm)), ("addmm.default",)),
        (ShapeRule(_added(_bmm)), ("baddbmm.default",)),
        (ShapeRule(_attention), ("_scaled_dot_product_flash_attention_for_cpu.default",)),
        (ShapeRule(_attention_backward), ("_scaled_dot_product_flash_attention_for_cpu_backward.default",)),
        (ShapeRule(_reduced), ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "any.dim", "all.dim",
                               "argmax.default", "argmin.default", "prod.dim_int")),
        (ShapeRule(_reduced_to_number), ("sum.default", "mean.default", "any.default", "all.default", "max.default",
                                         "min.default", "prod.default")),
        (ShapeRule(_layer_norm), ("native_layer_norm.default",)),
        (ShapeRule(_layer_norm_backward), ("native_layer_norm_backward.default",)),
        (ShapeRule(_nll_loss), ("nll_loss_forward.default",)),
        (ShapeRule(_nll_loss_backward), ("nll_loss_backward.default",)),
        (ShapeRule(_reduced_loss), ("mse_loss.default",)),
        (ShapeRule(_loss_gradient), ("mse_loss_backward.default",)),
        (ShapeRule(_embedding), ("embedding.default",)),
        (ShapeRule(_embedding_backward), ("embedding_dense_backward.default",)),
        (ShapeRule(_gathered), ("gather.default",)),
        (ShapeRule(_indexed), ("index_select.default",)),
        (ShapeRule(_concatenated), ("cat.default",)),
        (ShapeRule(_stacked), ("stack.default",)),
        (ShapeRule(_created, True), ("zeros.default", "ones.default", "full.default", "empty.memory_format",
                                     "rand.default", "randn.default")),
        (ShapeRule(_created_like, True), ("new_zeros.default", "new_ones.default", "new_full.default",
                                          "new_empty.default")),
        (ShapeRule(lambda end, **options: _counted(0, end, **options), True), ("arange.default",)),
        (ShapeRule(_counted, True), ("arange.start", "arange.start_step")),
        (ShapeRule(_slice_backward, True), ("slice_backward.default",)),
        (ShapeRule(_select_backward, True), ("select_backward.default",)),
        (ShapeRule(_viewed, True), ("view.default",)),
        (ShapeRule(_unsafe_viewed, True), ("_unsafe_view.default",)),
        (ShapeRule(_expanded, True), ("expand.default",)),
        (ShapeRule(_sliced, True), ("slice.Tensor",)),
        (ShapeRule(_selected, True), ("select.int",)),
        (ShapeRule(_split, True), ("split.Tensor",)),
        (ShapeRule(_split_by, True), ("split_with_sizes.default",)),
        (ShapeRule(_unbound), ("unbind.int",)),
        (ShapeRule(_transposed), ("transpose.int",)),
        (ShapeRule(_transposed_matrix), ("t.default",)),
        (ShapeRule(_permuted), ("permute.default",)),
        (ShapeRule(_unsqueezed), ("unsqueeze.default",)),
        (ShapeRule(_squeezed), ("squeeze.default", "squeeze.dim", "squeeze.dims")),
        (ShapeRule(_aliased), ("alias.default",)),
    )
    for name in names
}  # fmt: skip
