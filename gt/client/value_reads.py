"""Methods of a tensor that read its value into this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gt.client.session_reads import fetch
from gt.client.storage import TensorRef
from gt.core.tracebacks import ends_on_users_line


class ValueReads(torch.Tensor):
    """Methods of `gt.Tensor` that read its value."""

    __slots__ = ()
    _ref: TensorRef

    def _fetch(self) -> torch.Tensor:
        return fetch(self._ref)

    @ends_on_users_line
    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._fetch().numpy(force=force)

    @ends_on_users_line
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    @ends_on_users_line
    def tolist(self) -> Any:
        return self._fetch().tolist()

    @ends_on_users_line
    def item(self) -> Any:
        return self._fetch().item()

    # Torch calls these for the elements of a list (`torch.tensor([loss, loss])`), where it does not dispatch.

    @ends_on_users_line
    def __float__(self) -> float:
        return float(self._fetch())

    @ends_on_users_line
    def __int__(self) -> int:
        return int(self._fetch())

    @ends_on_users_line
    def __index__(self) -> int:
        return self._fetch().__index__()

    @ends_on_users_line
    def __complex__(self) -> complex:
        return complex(self._fetch())

    @ends_on_users_line
    def __bool__(self) -> bool:
        return bool(self._fetch())

    @ends_on_users_line
    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and not self._is_param else object.__format__(self, spec)

    @ends_on_users_line
    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self._fetch().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()
