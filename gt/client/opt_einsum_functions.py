"""`gt.tensordot` and `gt.transpose`, which also take NumPy's arguments.

`opt_einsum` calls the functions of the package that a tensor's class is from, with those arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gt.core.tracebacks import ends_on_users_line


@ends_on_users_line
def tensordot(a: torch.Tensor, b: torch.Tensor, dims: Any = 2, axes: Any = None) -> torch.Tensor:
    """torch.tensordot, whose `dims` may also be called `axes`.

    >>> gt.tensordot(gt.ones(2, 3), gt.ones(3, 4), axes=1).shape
    torch.Size([2, 4])
    """
    return torch.tensordot(a, b, dims=dims if axes is None else axes)


@ends_on_users_line
def transpose(input: torch.Tensor, dim0: int | Sequence[int], dim1: int | None = None) -> torch.Tensor:
    """torch.transpose of two dims, or a permutation of all of them.

    >>> x = gt.ones(2, 3, 4)
    >>> gt.transpose(x, 0, 1).shape, gt.transpose(x, (2, 0, 1)).shape
    (torch.Size([3, 2, 4]), torch.Size([4, 2, 3]))
    """
    return input.permute(*dim0) if dim1 is None else input.transpose(dim0, dim1)  # type: ignore[misc, call-overload, no-any-return]
