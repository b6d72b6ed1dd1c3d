"""Checks for wrong calls that torch's shape functions accept and its kernels refuse.

If a check raises, the call becomes a query: a worker runs it while the client waits, and torch's own error is raised on
the user's line before anything is written. So a check may be too strict, which costs a wait, and its message is never
seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gt.client.op_schema import OpSchema
from gt.client.torch_patches.dispatch_modes import disable_current_modes
from gt.client.torch_patches.op_registry import schema_of
from gt.client.torch_patches.pytree import tree_leaves, tree_map

_MASKS = (torch.bool, torch.uint8)


class MayBeRefused(Exception):
    """Torch's kernel refuses the call, or may."""


def check_arguments(op: OpSchema, args: Sequence[Any], kwargs: dict[str, Any], result: Any, on_cpu: bool) -> None:
    """Raise MayBeRefused if a kernel may refuse a call for which torch's shape function gave `result`."""
    special = _CHECKS.get(schema_of(op.func).name)
    if special is not None:
        special(*args, **kwargs)
    if on_cpu and torch.Tag.pointwise in op.func.tags and not op.random:
        _try_on_one_element(op, args, kwargs, result)


def _try_on_one_element(op: OpSchema, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Run a pointwise op on one element: only its kernel knows which dtypes it takes."""
    with disable_current_modes():
        given, named = tree_map(_one_element, (tuple(args), kwargs))
        made = op.func(*given, **named)
    if [_dtype_of(leaf) for leaf in tree_leaves(made)] != [_dtype_of(leaf) for leaf in tree_leaves(result)]:
        raise MayBeRefused


def _one_element(value: Any) -> Any:
    return torch.ones([1] * value.dim(), dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _check_values_fit(
    target: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, *_: Any
) -> None:
    """The values must expand to the indexed part of the target, whose size is known unless an index is a mask."""
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        values.expand(torch.ops.aten.index.Tensor(target, indices).shape)


def _check_not_empty(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    if tensor.numel() == 0:
        raise MayBeRefused


_CHECKS: dict[str, Callable[..., None]] = {
    "aten::index_put": _check_values_fit,
    "aten::index_put_": _check_values_fit,
    "aten::_index_put_impl_": _check_values_fit,
    "aten::_unsafe_index_put": _check_values_fit,
    "aten::max": _check_not_empty,
    "aten::min": _check_not_empty,
    "aten::aminmax": _check_not_empty,
    "aten::argmax": _check_not_empty,
    "aten::argmin": _check_not_empty,
}
