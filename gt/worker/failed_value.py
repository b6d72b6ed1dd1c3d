"""`FailedValue`: stored in place of a tensor that could not be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gt.core.messages import Failure


class FailedValue:
    """A tensor without a value; ops that depend on it fail with the same failure.

    `previous` is the tensor's last value, if the failed op was to write to the tensor and never began. `since` is the
    id that the tensor had with that value, and `until` the id that the write was to give it.
    """

    __slots__ = ("failure", "previous", "since", "until")

    def __init__(self, failure: Failure, previous: Any = None, since: int = 0, until: int = 0) -> None:
        self.failure = failure
        self.previous = previous
        self.since = since
        self.until = until

    def for_dependents(self) -> FailedValue:
        """The same failure for a tensor computed from this one, which has no previous value."""
        return self if self.previous is None else FailedValue(self.failure)

    def in_place_of(self, value: Any, old: int, new: int) -> FailedValue:
        """The same failure for a tensor that an op was to write to and did not touch: its id changes from `old` to
        `new`, and its value stays available as the previous one."""
        if isinstance(value, FailedValue):
            return FailedValue(self.failure, value.previous, value.since, value.until)
        return FailedValue(self.failure, value, old, new)


Fail: TypeAlias = Callable[[str, Sequence[Any], Exception], FailedValue]
"""Reports that an op raised an exception on some values; returns the value to store for its results."""
