"""Ops that are not one instruction: those that only change handles, and those that access memory of this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from gt.client import active_session
from gt.client.cached_calls import HandleType, rebind, wrap, wrap_view
from gt.client.call_template import to_wire
from gt.client.op_schema import OpSchema
from gt.client.resizing import allocate, resize_handle
from gt.client.session_reads import fetch
from gt.client.storage import (
    Geometry,
    Storage,
    StorageView,
    TensorRef,
    geometry_of,
    intern_geometry,
    restrided,
    storage_elements,
    strided_view,
    view_of,
)
from gt.client.torch_patches.autograd_nodes import accumulated_parameter, current_node
from gt.client.torch_patches.dispatch import (
    OpOverload,
    override_kernel,
    run_original,
    schema_of,
    traced_inside,
    tree_leaves,
    tree_map_only,
)
from gt.core.messages import NoteGradient
from gt.core.meta import contiguous_strides, is_dense
from gt.core.signatures import ViewStep


def note_gradient(ref: TensorRef) -> None:
    """Called for each `detach`: autograd detaches a gradient before it makes it the `.grad` of a parameter. Does
    nothing for any other tensor, and with one worker."""
    node = current_node()
    if node is None or ref.session.alone:
        return
    parameter = getattr(accumulated_parameter(node), "_ref", None)
    if parameter is not None and parameter.session is ref.session:
        site, is_transposed = ref.session.sites.current(), _is_transposed(ref)
        ref.session.outbox.submit(lambda ids: NoteGradient(ids[0], ids[1], site, is_transposed), (ref, parameter))


def _is_transposed(ref: TensorRef) -> bool:
    """Whether a tensor is a view of its storage with all dims in reverse order."""
    view, whole = ref.geometry, ref.storage.geometry
    return view is not whole and (view.shape, view.stride) == (whole.shape[::-1], whole.stride[::-1])


Special: TypeAlias = Callable[[HandleType, OpSchema, tuple[Any, ...], dict[str, Any]], Any]


def run_on_host(cls: HandleType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op in this process, because it writes to a plain tensor or returns one. GT tensors are read first, and
    written back if the op wrote to them. An op that writes to both, as a gradient scaler does to gradients and a flag,
    runs on GT."""
    written = [tensor for tensor in _written(func, args, kwargs) if isinstance(tensor, torch.Tensor)]
    if 0 < sum(hasattr(tensor, "_ref") for tensor in written) < len(written):
        return _run_on_workers(cls, func, args, kwargs)
    originals: dict[int, torch.Tensor] = {}

    def read(tensor: torch.Tensor) -> torch.Tensor:
        ref = getattr(tensor, "_ref", None)
        if ref is None:
            return tensor
        copy = fetch(ref)
        originals[id(copy)] = tensor
        return copy

    host_args, host_kwargs = tree_map_only(torch.Tensor, read, (args, kwargs))
    result = func(*host_args, **host_kwargs)
    for target in _written(func, host_args, host_kwargs):
        if id(target) in originals:
            _write_back(originals[id(target)], target)
    return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), result)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an op writes to."""
    arguments = schema_of(func).arguments
    given = dict(zip([argument.name for argument in arguments], args, strict=False)) | kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(given.get(argument.name))


def _run_on_workers(cls: HandleType, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on GT, with copies of its plain tensors. Those that it writes to are read back."""
    originals: dict[int, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if hasattr(tensor, "_ref"):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = wrap(cls, active_session.current().upload(tensor))
            originals[id(copies[id(tensor)])] = tensor
        return copies[id(tensor)]

    result = func(*tree_map_only(torch.Tensor, moved, args), **tree_map_only(torch.Tensor, moved, kwargs))
    for target in _written(func, args, kwargs):
        if id(target) in copies:
            _set_plain(target, fetch(copies[id(target)]._ref))  # type: ignore[attr-defined]
    return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), result)


def _set_plain(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a plain tensor a value, whose size the op may have chosen, as for an empty `out=`."""
    if tensor.shape != value.shape:
        tensor.resize_(value.numel()).as_strided_(value.shape, value.stride())
    tensor.copy_(value)


def _write_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.shape != value.shape:
        rebind(tensor, active_session.current().upload(value))
    else:
        tensor.copy_(value)


def _same(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrap_view(cls, _ref(args[0]))


def _detach(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ref = _ref(args[0])
    note_gradient(ref)
    return wrap_view(cls, ref)


def _item(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ref = args[0]._ref
    return fetch(ref).item()


def _as_strided(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ref = args[0]._ref
    given = dict(zip(("self", "size", "stride", "storage_offset"), args, strict=False)) | kwargs
    offset = given.get("storage_offset")
    geometry = intern_geometry(
        torch.Size(given["size"]),
        tuple(given["stride"]),
        ref.geometry.offset if offset is None else offset,
        ref.geometry.dtype,
    )
    return wrap_view(cls, restrided(ref, _within(ref, geometry)))


def _within(ref: TensorRef, geometry: Geometry) -> Geometry:
    """Raise torch's error for a view that reaches beyond the storage."""
    if geometry.storage_span() > storage_elements(ref):
        size = geometry.dtype.itemsize
        raise RuntimeError(
            f"setStorage: sizes {list(geometry.shape)}, strides {list(geometry.stride)}, storage offset "
            f"{geometry.offset}, and itemsize {size} requiring a storage size of {geometry.storage_span() * size} are "
            f"out of bounds for storage of size {storage_elements(ref) * size}"
        )
    return geometry


def reshape_in_place(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the handle a view of the tensor that it was: `t_`, `squeeze_`, ..."""
    tensor = args[0]
    meta = tensor._ref.geometry.on_meta()
    op.func(meta, *args[1:], **kwargs)
    step = ViewStep(
        _VIEW_NAMES.get(op.name) or op.name.replace("_.", "."),
        tuple(to_wire(value) for value in args[1:]),
        {key: to_wire(value) for key, value in kwargs.items()},
        results=(geometry_of(meta).meta(),),
    )
    key = (op.name, tensor._ref.geometry, repr(args[1:]), repr(kwargs))
    return rebind(tensor, view_of(tensor._ref, key, step, geometry_of(meta), strided=True))


_VIEW_NAMES = {"aten.transpose_.default": "aten.transpose.int"}


def _as_strided_in_place(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, ref = args[0], args[0]._ref
    storage = torch.empty(storage_elements(ref), dtype=ref.geometry.dtype, device="meta")
    meta = storage.as_strided(ref.geometry.shape, ref.geometry.stride, ref.geometry.offset)
    op.func(meta, *args[1:], **kwargs)
    return rebind(tensor, restrided(ref, geometry_of(meta)))


def _resize(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, ref = args[0], getattr(args[0], "_ref", None)
    if ref is None:
        return run_on_host(cls, op.func, args, kwargs)
    meta = ref.geometry.on_meta()
    op.func(meta, *[_meta_of(value) for value in args[1:]], **kwargs)
    return resize_handle(cls, tensor, geometry_of(meta))


def _meta_of(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _set_source(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the handle another tensor, a view of another tensor's storage, or empty: `set_`."""
    tensor, source = args[0], args[1] if len(args) > 1 else None
    if source is None:
        empty = intern_geometry(torch.Size([0]), (1,), 0, tensor.dtype)
        return rebind(tensor, allocate(cls, empty))
    if not isinstance(source, torch.Tensor):
        raise RuntimeError("set_() with a storage is not possible on a GT tensor: its bytes are on a worker")
    if len(args) > 2 or kwargs:
        meta = source._ref.geometry.on_meta()  # type: ignore[attr-defined]
        op.func(tensor._ref.geometry.on_meta(), meta, *args[2:], **kwargs)
        offset, size = args[2], args[3]
        stride = args[4] if len(args) > 4 and args[4] else torch.empty(size, device="meta").stride()
        geometry = intern_geometry(torch.Size(size), tuple(stride), offset, tensor.dtype)
        return rebind(tensor, strided_view(source._ref.storage, geometry))  # type: ignore[attr-defined]
    if hasattr(tensor, "_ref") and not hasattr(source, "_ref"):
        source = tensor._as_data(source)
    return rebind(tensor, _ref(source))


def _view(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `_unsafe_view` as a view: its schema declares no alias, but torch's own code relies on shared memory."""
    return cls.__torch_dispatch__(torch.ops.aten.view.default, (), args, kwargs)  # type: ignore[attr-defined]


def _nothing(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None


def _pack(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pack padded sequences: their rows in another order. The batch sizes are a plain tensor, as the lengths are:
    torch's recurrent layers read its memory."""
    given = dict(zip(("input", "lengths", "batch_first"), args, strict=False)) | kwargs
    padded = given["input"]
    row_numbers = torch.arange(padded.shape[0] * padded.shape[1]).view(padded.shape[0], padded.shape[1])
    rows, batch_sizes = op.func(row_numbers, _plain(given["lengths"]), given["batch_first"])
    return padded.flatten(0, 1).index_select(0, rows), batch_sizes


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    ref = getattr(tensor, "_ref", None)
    return tensor if ref is None else fetch(ref)  # type: ignore[no-any-return]


def _pad(
    packed: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: Any, length: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Pad packed sequences: their rows in another order, and rows of the padding."""
    func = torch.ops.aten._pad_packed_sequence.default
    if getattr(packed, "_ref", None) is None:
        return run_original(func, packed, batch_sizes, batch_first, padding, length)  # type: ignore[no-any-return]
    count, rest = packed.shape[0], packed.shape[1:]
    rows, lengths = run_original(func, torch.arange(count), _plain(batch_sizes), False, count, length)
    padded = torch.cat([packed, packed.new_full((1, *rest), padding)]).index_select(0, rows.flatten())
    padded = padded.view(*rows.shape, *rest)
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _pack_gradient(
    gradient: torch.Tensor, shape: Sequence[int], batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:  # fmt: skip
    return _pad(gradient, batch_sizes, batch_first, 0, shape[1] if batch_first else shape[0])[0]


def _one_hot(labels: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Torch compares the labels of a tensor subclass with all classes, which keeps the order of dims; for other tensors
    it writes into row-major zeros."""
    made = run_original(torch.ops.aten.one_hot.default, labels, num_classes)
    return made.contiguous()  # type: ignore[no-any-return]


def _max_pool1d(
    signal: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> torch.Tensor:
    """Torch has a kernel without indices, which gives row-major results, for tensors that need no gradient and are not
    of a subclass."""
    func = torch.ops.aten.max_pool1d.default
    made: torch.Tensor = run_original(func, signal, kernel_size, stride, padding, dilation, ceil_mode)
    is_torchs = getattr(signal, "_ref", None) is None or made.requires_grad
    if is_torchs or made.stride() == contiguous_strides(tuple(made.shape)):
        return made
    has_tangent = torch.autograd.forward_ad.unpack_dual(made).tangent is not None
    return made if has_tangent else made.clone(memory_format=torch.contiguous_format)


def _split_at_tensor(tensor: torch.Tensor, places: torch.Tensor, dim: int = 0) -> Any:
    """Torch reads the memory of the number of parts, or of the indices between them."""
    return run_original(torch.ops.aten.tensor_split.tensor_indices_or_sections, tensor, _plain(places), dim)


# Torch decomposes these before they reach a tensor's class, and then accesses memory or takes another formula.
override_kernel("max_pool1d", _max_pool1d)
override_kernel("one_hot", _one_hot)
override_kernel("tensor_split.tensor_indices_or_sections", _split_at_tensor)
override_kernel("_pad_packed_sequence", _pad)
override_kernel("_pack_padded_sequence_backward", _pack_gradient)


def _traced_convolution(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A convolution inside a trace, which records the op that torch's kernel calls."""
    cudnn = torch.backends.cudnn
    with traced_inside():
        return torch._convolution(*args, cudnn.benchmark, cudnn.deterministic, cudnn.enabled, cudnn.allow_tf32)


def _convolution(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `_convolution`, a convolution with the settings of one device, as `convolution`."""
    return cls.__torch_dispatch__(torch.ops.aten.convolution.default, (), args[:9], kwargs)  # type: ignore[attr-defined]


def _zeros_like_primal(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros in a new storage with the strides that `other` has in its storage, once for each element of the batch dims
    of `self`. Forward-mode AD copies a tangent there, so that views of its primal are views of the tangent."""
    given = dict(zip(("self", "other"), args, strict=False)) | kwargs
    tangent, primal = given["self"], given["other"]
    batch = tuple(tangent.shape[: given.get("self_num_batch_dims", 0)])
    ref = _ref(primal)
    storage = ref.storage.geometry
    with torch.no_grad():
        if not batch and tangent.dtype is ref.geometry.dtype and is_dense(storage.shape, storage.stride):
            zeros = _zeros(cls, storage)
            return wrap_view(cls, zeros if ref.path is None else StorageView(zeros, ref.path, ref.geometry))
        count = storage_elements(ref)
        around = tuple(count * step for step in contiguous_strides(batch))
        shape, stride = (*batch, *ref.geometry.shape), (*around, *ref.geometry.stride)
        batched = intern_geometry(torch.Size(shape), stride, ref.geometry.offset, tangent.dtype)
        if is_dense(shape, stride) and not batched.offset:
            return wrap(cls, _zeros(cls, batched))
        flat = intern_geometry(torch.Size([math.prod(batch) * count]), (1,), 0, tangent.dtype)
        return wrap(cls, strided_view(_zeros(cls, flat), batched))


def _zeros(cls: HandleType, geometry: Geometry) -> Storage:
    storage = allocate(cls, geometry)
    wrap(cls, storage).zero_()
    return storage


def _has_storage_of_same_size(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answered by the client: on workers the storages of shards and of copies have other sizes."""
    first, second = [storage_elements(_ref(tensor)) for tensor in args]
    return first == second


def _is_same_size(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].shape == args[1].shape


def _is_set_to(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, second = [getattr(tensor, "_ref", None) for tensor in args]
    if first is None or second is None:
        return False
    return first.storage is second.storage and first.geometry is second.geometry


def _ref(tensor: torch.Tensor) -> TensorRef:
    ref: TensorRef | None = getattr(tensor, "_ref", None)
    return active_session.current().upload(tensor) if ref is None else ref


def _never(cls: HandleType, op: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return False


SPECIAL: dict[str, Special] = {
    "aten.detach.default": _detach,
    "aten.detach_.default": lambda cls, op, args, kwargs: args[0],
    "aten.alias.default": _same,
    "aten.lift_fresh.default": _same,
    "aten.lift.default": _same,
    "aten._local_scalar_dense.default": _item,
    "aten._unsafe_view.default": _view,
    "aten.convolution.default": _traced_convolution,
    "aten._convolution.default": _convolution,
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_.default": _as_strided_in_place,
    "aten.resize_.default": _resize,
    "aten.resize_as_.default": _resize,
    "aten.set_.default": _set_source,
    "aten.set_.source_Tensor": _set_source,
    "aten.set_.source_Tensor_storage_offset": _set_source,
    "aten.set_.source_Storage": _set_source,
    "aten.set_.source_Storage_storage_offset": _set_source,
    "aten.is_pinned.default": _never,
    "aten.pin_memory.default": _same,
    "aten._pin_memory.default": _same,
    "aten.record_stream.default": _nothing,
    "aten._pack_padded_sequence.default": _pack,
    "aten._nested_tensor_from_mask_left_aligned.default": _never,
    "aten._new_zeros_with_same_feature_meta.default": _zeros_like_primal,
    "aten._has_same_storage_numel.default": _has_storage_of_same_size,
    "aten.is_same_size.default": _is_same_size,
    "aten.is_set_to.default": _is_set_to,
}
