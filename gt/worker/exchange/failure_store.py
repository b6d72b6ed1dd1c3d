"""The failures that flags in exchanges stand for.

A worker that has no value takes part in an exchange all the same, with a flag. It first writes the failure to the store
at which workers meet; a worker that gets a flag reads it from there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch.distributed as dist

from gt.core.messages import Failure
from gt.worker.failed_value import FailedValue

log = logging.getLogger("gt.worker")
_ARRIVAL_TIME = timedelta(milliseconds=500)  # the store may get a failure after its flag has arrived
_KEPT = 1024  # failures of this worker that stay in the store
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Failure)


class FailureStore:
    """`store` is a function, because a worker may join another store later."""

    def __init__(self, store: Callable[[], dist.Store], worker: int) -> None:
        self._store = store
        self._worker = worker
        self._written: deque[str] = deque()

    def write(self, members: tuple[int, ...], number: int, task: int, failed: FailedValue) -> None:
        """Write the failure of a task of the exchange with a number among some members. Any member may write it: all
        failures of one task are equally good reasons. A store that has ended takes no text; the flag of the task tells
        the others all the same that it has failed."""
        key = _key(members, number, task)
        try:
            self._store().set(key, _encoder.encode(failed.failure))
            self._written.append(key)
            while len(self._written) > _KEPT:
                self._store().delete_key(self._written.popleft())
        except Exception as error:
            log.warning("the store has not taken the text of a failure: %s", error)

    def read(self, members: tuple[int, ...], number: int, task: int) -> FailedValue:
        """The failure that a flag stands for. There is none to be read if the store has ended, or if the member that
        set the flag did not know the failure itself: see DeferredFailureFlags."""
        key = _key(members, number, task)
        try:
            self._store().wait([key], _ARRIVAL_TIME)
            return FailedValue(_decoder.decode(self._store().get(key)))
        except Exception as error:
            text = f"one of workers {members} has no value for an exchange; its failure is not in the store: {error}"
            return FailedValue(Failure(self._worker, "exchange", (), 0, 0, "RuntimeError", text, "", members))


def _key(members: tuple[int, ...], number: int, task: int) -> str:
    return f"failure {members} {number} {task}"
