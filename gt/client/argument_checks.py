"""Wrong calls that torch's shape functions let pass and its kernels refuse.

A check that raises makes the call a query: torch's own error then comes on the user's line, and what the op would have
written is as it was. So a check may be too strict, which costs a wait, and its message is never seen.
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
    """Torch's kernel would refuse this, or may."""


def check(op: OpSchema, args: Sequence[Any], kwargs: dict[str, Any], result: Any, on_cpu: bool) -> None:
    """Raises where a kernel may refuse a call with tensors without bytes that torch's shape function has answered."""
    special = _CHECKS.get(schema_of(op.func).name)
    if special is not None:
        special(*args, **kwargs)
    if on_cpu and torch.Tag.pointwise in op.func.tags and not op.random:
        _try_on_one_element(op, args, kwargs, result)


def _try_on_one_element(op: OpSchema, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Which dtypes an op takes, only its kernel knows; if it works on each element by itself, one tells."""
    with disable_current_modes():
        given, named = tree_map(_one_element, (tuple(args), kwargs))
        made = op.func(*given, **named)
    if [_dtype_of(leaf) for leaf in tree_leaves(made)] != [_dtype_of(leaf) for leaf in tree_leaves(result)]:
        raise MayBeRefused


def _one_element(value: Any) -> Any:
    return torch.ones([1] * value.dim(), dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _put(target: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, *_: Any) -> None:
    """What is put has to fit where it is put; how large that is, is known unless a mask says it."""
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        values.expand(torch.ops.aten.index.Tensor(target, indices).shape)


def _some(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    if tensor.numel() == 0:
        raise MayBeRefused


_CHECKS: dict[str, Callable[..., None]] = {
    "aten::index_put": _put,
    "aten::index_put_": _put,
    "aten::_index_put_impl_": _put,
    "aten::_unsafe_index_put": _put,
    "aten::max": _some,
    "aten::min": _some,
    "aten::aminmax": _some,
    "aten::argmax": _some,
    "aten::argmin": _some,
}
