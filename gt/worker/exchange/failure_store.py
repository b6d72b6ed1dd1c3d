"""The failures that flags in exchanges stand for, in the key-value store of the workers.

A worker without a value takes part in an exchange all the same, with a flag. It first writes its failure to the store
at which workers meet, and a worker that receives the flag reads the failure from there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import msgspec

from gt.core.messages import Failure
from gt.worker.exchange.sealed_store import SealedStore
from gt.worker.failed_value import FailedValue

log = logging.getLogger("gt.worker")
_ARRIVAL_TIME = timedelta(milliseconds=500)  # the store may get a failure after its flag has arrived
_KEPT = 1024  # failures of this worker that stay in the store
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Failure)


class FailureStore:
    """Writes and reads failures by their exchange and task. `store` is a function, because a worker may join another
    store later."""

    def __init__(self, store: Callable[[], SealedStore], worker: int) -> None:
        self._store = store
        self._worker = worker
        self._written: deque[str] = deque()

    def write(self, members: tuple[int, ...], number: int, task: int, failed: FailedValue) -> None:
        """Write the failure of a task of the exchange with a number among some members. Several members may write one:
        any failure of a task explains it. If the store has ended, the others learn from the flag alone that the task
        has failed."""
        key = _key(members, number, task)
        try:
            self._store().set(key, _encoder.encode(failed.failure))
            self._written.append(key)
            while len(self._written) > _KEPT:
                self._store().delete_key(self._written.popleft())
        except Exception as error:
            log.warning("the store has not taken the text of a failure: %s", error)

    def read(self, members: tuple[int, ...], number: int, task: int) -> FailedValue:
        """The failure that a flag stands for. The store has none if its host has ended, or if the member that set the
        flag did not know the failure itself (see DeferredFailureFlags): then the result says so."""
        key = _key(members, number, task)
        try:
            self._store().wait([key], _ARRIVAL_TIME)
            return FailedValue(_decoder.decode(self._store().get(key)))
        except Exception as error:
            text = f"one of workers {members} has no value for an exchange; its failure is not in the store: {error}"
            return FailedValue(Failure(self._worker, "exchange", (), 0, 0, "RuntimeError", text, "", members))


def _key(members: tuple[int, ...], number: int, task: int) -> str:
    return f"failure {members} {number} {task}"
