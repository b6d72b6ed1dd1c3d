"""`FailedValue`: stored in place of a tensor that could not be computed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gt.core.errors import LimitError
from gt.core.messages import Command, Failure, RunOp


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


_MAX_TEXT = 1 << 16


def make_failure(worker: int, op: str, inputs: tuple[str, ...], command: Command, error: Exception) -> Failure:
    """The failure of a command. `inputs` are the metas of the op's tensors, as text."""
    is_refusal = isinstance(error, LimitError) and error.__cause__ is None  # its text says all
    text = "" if is_refusal else "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    kind, message = type(error).__name__, str(error)[:_MAX_TEXT]
    return Failure(worker, op, inputs, getattr(command, "site", 0), origin_of(command), kind, message, text)


def missing_output(worker: int, op: str, command: RunOp) -> Failure:
    """The failure of reading an output for which the op returned no tensor, such as a masked gradient."""
    message = "the op gives no tensor here (a gradient that was not asked for)"
    return Failure(worker, op, (), command.site, origin_of(command), "RuntimeError", message, "")


def origin_of(command: Command) -> int:
    """The id that identifies the failure of a command, the same on all workers; 0 for a command without results."""
    if isinstance(command, RunOp):
        return next(iter(command.outputs), 0)
    request: int = getattr(command, "request", 0) or getattr(command, "id", 0)
    return request
