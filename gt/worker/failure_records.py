"""The `Failure` record of a command that raised an exception."""

from __future__ import annotations

import traceback

from gt.core.errors import LimitError
from gt.core.messages import Command, Failure, RunOp

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
