"""What stands in the store where a value should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gt.core.messages import Failure


class FailedValue:
    """The value could not be computed. What depends on it fails in the same way. `former`: the value before a write
    that never began, because what should have been written has no value either; `since` is the id that the tensor had
    with that value, and `until` the id that the write should have given it."""

    __slots__ = ("failure", "former", "since", "until")

    def __init__(self, failure: Failure, former: Any = None, since: int = 0, until: int = 0) -> None:
        self.failure = failure
        self.former = former
        self.since = since
        self.until = until

    def passed_on(self) -> FailedValue:
        """What stands in place of a tensor that was to be computed from this one, which has no former value."""
        return self if self.former is None else FailedValue(self.failure)

    def instead_of(self, value: Any, old: int, new: int) -> FailedValue:
        """What stands in place of a tensor that should have been written, and was not touched: it had one id, and goes
        on with another."""
        if isinstance(value, FailedValue):
            return FailedValue(self.failure, value.former, value.since, value.until)
        return FailedValue(self.failure, value, old, new)


Fail: TypeAlias = Callable[[str, Sequence[Any], Exception], FailedValue]
"""Notes that an op has failed on some tensors; gives what stands in place of its results."""
