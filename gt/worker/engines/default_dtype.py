"""Functions that run with their own default dtype.

Torch has one default dtype for the whole process. An embedded worker shares it with the user's threads, which see any
change of it. So an engine sets the default only while a function that may use it runs, and only if the op was recorded
with another default than the present one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class WithDefaultDtype:
    """A function that runs with `dtype` as torch's default dtype."""

    __slots__ = ("bare", "dtype")

    def __init__(self, bare: Callable[..., Any], dtype: torch.dtype) -> None:
        self.bare = bare
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hot path."""
        if torch.get_default_dtype() is self.dtype or not may_need_default(args, kwargs):
            return self.bare(*args, **kwargs)
        with _default_dtype(self.dtype):
            return self.bare(*args, **kwargs)


def without_default_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.bare if isinstance(function, WithDefaultDtype) else function


def may_need_default(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether torch may use the default dtype: none is given, and the tensors suggest none, as when integers are
    divided. Torch does not say which ops do so."""
    if kwargs.get("dtype") is not None:
        return False
    dtypes = {tensor.dtype for tensor in _tensors((*args, *kwargs.values()))}
    return not dtypes or not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


def _tensors(values: Sequence[Any]) -> Generator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        if torch.get_default_dtype() is dtype:  # otherwise another thread has set it meanwhile
            torch.set_default_dtype(previous)
