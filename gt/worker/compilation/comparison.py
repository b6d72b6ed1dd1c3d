"""Compares the results of compiled code with those of the ops one by one."""

from __future__ import annotations

import torch

# As torch.testing.assert_close has them. Other dtypes have to be equal.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


def difference(compiled: torch.Tensor, eager: torch.Tensor) -> str | None:
    """Why two tensors do not agree; None if they do. Beside torch's own tolerances, an error in proportion to the
    largest element is allowed: sums of many elements are rounded in another order."""
    if (compiled.shape, compiled.dtype) != (eager.shape, eager.dtype):
        return f"{compiled.dtype} of shape {list(compiled.shape)} instead of {eager.dtype} of {list(eager.shape)}"
    rtol, atol = _TOLERANCES.get(eager.dtype, (0.0, 0.0))
    if rtol and eager.numel():
        finite = eager[eager.isfinite()].abs()
        atol = max(atol, max(atol, rtol) * float(finite.max()) if finite.numel() else 0.0)
    try:
        torch.testing.assert_close(compiled, eager, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None
