"""The record by which a fork server reports to its program the workers that it has started and that have ended."""

from __future__ import annotations

import msgspec

GRACE_SECONDS = 3.0  # time for workers that are asked to end


class WorkerStatus(msgspec.Struct, frozen=True):
    """A worker that was forked. `exit_code` is None while it runs, and negative if a signal has ended it."""

    number: int
    pid: int
    exit_code: int | None = None
