"""What stands in the store where a value should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gt.core.messages import Failure


class Failing:
    """The value could not be computed. What depends on it fails in the same way."""

    __slots__ = ("failure",)

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


Fail: TypeAlias = Callable[[str, Sequence[Any], Exception], Failing]
"""Notes that an op has failed on some tensors; gives what stands in place of its results."""
