"""Moves modules to GT: tensors that share memory stay tied, and parameters of lazy modules get their shapes later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from gt.client import active_session
from gt.client.cached_calls import wrap
from gt.client.factory_mode import FactoryMode, is_factory_mode_on
from gt.client.parameter_layouts import follow_parameters
from gt.client.tensor import Handle, Tensor, as_object, of_class, to_gt
from gt.client.torch_patches.autograd_nodes import gradient_hook_tables, refuse_backward, set_gradient_hook_tables
from gt.client.torch_patches.nn_modules import mark_parameter, own_buffers, own_parameters, patch_lazy_construction
from gt.core.tables import print_bytes
from gt.sharding.spec import ShardingSpec
from gt.wire.long_waits import LongWait


def move_module(module: torch.nn.Module, layouts: Mapping[int, ShardingSpec] | None = None) -> list[torch.Tensor]:
    """Move each distinct parameter and buffer of a module once, in place. Tensors that share memory share it on GT.
    `layouts` are those of plain tensors, by id(); returns the moved tensors that have them."""
    tables = [table for owner in module.modules() for table in (own_parameters(owner), own_buffers(owner))]
    values = {id(value): value for table in tables for value in table.values() if value is not None}
    data = _move_shared([value for value in values.values() if _may_share(value)])
    layouts = {ident: layout for ident, layout in (layouts or {}).items() if ident in values and ident not in data}
    moved: dict[int, torch.Tensor] = {}
    with LongWait(active_session.current().display) as wait:
        for ident, value in values.items():
            moved[ident] = move_tensor(value, data.get(ident), layouts.get(ident))
            wait.tell(lambda: _describe_moved(list(values.values()), len(moved)))
    for table in tables:
        for name, value in table.items():
            if value is not None:
                table[name] = moved[id(value)]
    return [moved[ident] for ident in layouts]


def _describe_moved(values: Sequence[torch.Tensor], count: int) -> str:
    sizes = [0 if is_lazy(value) else value.numel() * value.itemsize for value in values]
    done, total = print_bytes(sum(sizes[:count])), print_bytes(sum(sizes))
    return f"moving a model: {count} of {len(values)} tensors, {done} of {total}"


def _may_share(value: torch.Tensor) -> bool:
    """Whether a tensor may share its memory with others."""
    if isinstance(value, Tensor) or is_lazy(value):
        return False
    return value.layout is torch.strided and value.device.type == "cpu" and value.numel() > 0


def _move_shared(values: Sequence[torch.Tensor]) -> dict[int, Tensor]:
    """The moved data of plain tensors that share memory, by id(): one upload for each region, and views of it."""
    storages: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for value in values:
        storages[value.untyped_storage().data_ptr(), value.dtype].append(value)
    data: dict[int, Tensor] = {}
    for group in [group for parts in storages.values() for group in _overlapping(parts)]:
        if len(group) > 1:
            region = _SharedRegion(group)
            data |= {id(part): region.part(part) for part in group}
    return data


def _overlapping(parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of tensors of one storage: tensors of different groups share no element. All weights of a file may be one
    storage."""
    group: list[torch.Tensor] = []
    for part in sorted(parts, key=torch.Tensor.storage_offset):
        if group and part.storage_offset() >= max(map(_end, group)):
            yield group
            group = []
        group.append(part)
    yield group


class _SharedRegion:
    """The memory of several plain tensors on GT: that of one of them, if it covers the others, or from the first to
    the last element."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        start, end = min(part.storage_offset() for part in parts), max(map(_end, parts))
        largest = max(parts, key=lambda part: (part.numel(), part.is_contiguous())).detach()
        covers = largest.is_contiguous() and (largest.storage_offset(), _end(largest)) == (start, end)
        self._start = start
        self._whole = to_gt(largest if covers else largest.as_strided((end - start,), (1,), start))
        self._parts = {(self._whole.shape, self._whole.stride(), 0): self._whole}

    def part(self, value: torch.Tensor) -> Tensor:
        view = value.shape, value.stride(), value.storage_offset() - self._start
        if view not in self._parts:
            self._parts[view] = self._whole.as_strided(*view)  # type: ignore[assignment]
        return self._parts[view].data  # type: ignore[no-any-return]


def _end(tensor: torch.Tensor) -> int:
    """The offset in the storage after the last element of a tensor."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() + reach + 1


def move_tensor(value: torch.Tensor, data: Tensor | None = None, layout: ShardingSpec | None = None) -> torch.Tensor:
    """A parameter or buffer on GT, with its gradient and its attributes. A parameter stays the object that it was, as
    in torch's `module.to(device)`, so that optimizers and lists that hold it go on with it. `data`: its data, if that
    is on GT already."""
    if isinstance(value, Tensor):
        value._ref.session.require_open()
        return value
    if is_lazy(value):
        new = uninitialized(isinstance(value, UninitializedParameter), value.requires_grad, value.dtype, value.__dict__)
    else:
        with torch.no_grad():
            moved = (to_gt(value.detach(), layout) if data is None else data).data
        new = of_class(type(value), moved.requires_grad_(value.requires_grad))
        new.__dict__.update(value.__dict__)
    if value.grad is not None:
        new.grad = to_gt(value.grad, layout)
    return replace_parameter(value, new) if isinstance(value, torch.nn.Parameter) else new


def replace_parameter(parameter: torch.nn.Parameter, moved: Tensor) -> Tensor:
    """Make a plain parameter the moved one, with its hooks. A graph that was recorded before refuses backward."""
    refuse_backward(parameter, "a parameter of this graph was moved to GT after its forward: run the forward again")
    hooks = gradient_hook_tables(parameter)
    kind = Tensor if isinstance(moved, Handle) else type(moved)
    new: Tensor = as_object(parameter, moved, kind)
    mark_parameter(new)
    set_gradient_hook_tables(new, hooks)
    follow_parameters([new])
    return new


class _Lazy:
    """A parameter or buffer of a lazy module, which becomes a tensor when the first input gives its shape."""

    __torch_dispatch__: Any = Tensor.__torch_dispatch__  # results of ops are never lazy
    requires_grad: bool
    _attributes: Any
    data: Any

    def materialize(self, shape: Sequence[int], device: Any = None, dtype: torch.dtype | None = None) -> None:
        with FactoryMode(Tensor):
            data = torch.empty(tuple(shape), dtype=dtype or self.data.dtype)
        self.__class__ = Tensor
        self.data = data

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._copy()
        return memo[id(self)]

    def __copy__(self) -> Any:
        return self._copy()

    def _copy(self) -> Any:
        function, arguments = self.__reduce_ex__(2)
        return function(*arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, UninitializedParameter)
        return uninitialized, (is_parameter, self.requires_grad, self.data.dtype, self._attributes())


class _LazyParameter(_Lazy, UninitializedParameter, Tensor):
    pass


class _LazyBuffer(_Lazy, UninitializedBuffer, Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A module whose dtype changes takes the result as its buffer, so it must be lazy too."""
        result = super().__torch_function__(func, types, args, kwargs)
        if type(result) is Handle:
            result = as_object(wrap(Tensor, result._ref), result, cls)
            result.__dict__.update(args[0]._attributes())
        return result


def uninitialized(
    is_parameter: bool, requires_grad: bool, dtype: torch.dtype | None, state: dict[str, Any]
) -> Tensor:  # fmt: skip
    """A lazy parameter or buffer."""
    with FactoryMode(Tensor):
        empty: Any = torch.empty(0, dtype=dtype, requires_grad=requires_grad)
    new = as_object(wrap(Tensor, empty._ref), empty, _LazyParameter if is_parameter else _LazyBuffer)
    new.__dict__.update({name: value for name, value in state.items() if name != "_ref"})
    if is_parameter:
        mark_parameter(new)
    return new  # type: ignore[no-any-return]


patch_lazy_construction(UninitializedParameter, is_factory_mode_on, move_tensor)
patch_lazy_construction(UninitializedBuffer, is_factory_mode_on, move_tensor)
torch.serialization.add_safe_globals([uninitialized])
