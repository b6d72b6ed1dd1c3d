"""Methods of a tensor that turn it into a view of itself: `t_`, `squeeze_`, ..."""

from __future__ import annotations

from typing import Any

import torch

from gt.client.storage import TensorRef
from gt.client.torch_patches.wrapper_tensors import is_view, swap_tensors


class InPlaceViews(torch.Tensor):
    """Methods of `gt.Tensor` that turn it into a view of itself."""

    __slots__ = ()
    _ref: TensorRef

    def t_(self) -> Any:
        return self._become("t")

    def transpose_(self, dim0: int, dim1: int) -> Any:
        return self._become("transpose", dim0, dim1)

    def swapaxes_(self, axis0: int, axis1: int) -> Any:
        return self._become("transpose", axis0, axis1)

    def swapdims_(self, dim0: int, dim1: int) -> Any:
        return self._become("transpose", dim0, dim1)

    def squeeze_(self, *dim: Any, **named: Any) -> Any:
        return self._become("squeeze", *dim, **named)

    def unsqueeze_(self, dim: int) -> Any:
        return self._become("unsqueeze", dim)

    def as_strided_(self, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
        return self._become("as_strided", size, stride, storage_offset)

    def _become(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Exchange this tensor for a view of it, with all that autograd knows of the view: autograd records the ops
        that make a view, and not those that change a view in place."""
        if not (torch.is_grad_enabled() and is_view(self)):
            return getattr(super(), f"{name}_")(*args, **kwargs)
        other = getattr(self, name)(*args, **kwargs)
        self._ref, other._ref = other._ref, self._ref  # type: ignore[misc]
        swap_tensors(self, other)
        return self
