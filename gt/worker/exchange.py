"""How workers exchange tensors: one small interface, in memory or by process groups."""

from __future__ import annotations

from typing import Protocol

from gt.core.messages import Failure, WorkerTransfer
from gt.worker.engines.engine import Engine, Value


class Exchange(Protocol):
    """A failure travels in place of the tensor, so that a receiver never waits for a value that will not come."""

    def send(self, command: WorkerTransfer, engine: Engine, value: Value | None, failure: Failure | None) -> None: ...

    def receive(self, command: WorkerTransfer, engine: Engine) -> tuple[Value | None, Failure | None]: ...

    def host_store(self) -> int:
        """Start the store that process groups meet at; gives its port."""

    def join_store(self, host: str, port: int, name: str) -> None: ...


class MemoryExchange:
    """Between virtual workers of one process, which run in the dispatcher's order: a send precedes its receive."""

    def __init__(self) -> None:
        self._parcels: dict[tuple[int, int, int], tuple[Value | None, Failure | None]] = {}

    def send(self, command: WorkerTransfer, engine: Engine, value: Value | None, failure: Failure | None) -> None:
        self._parcels[command.id, command.source, command.target] = (value, failure)

    def receive(self, command: WorkerTransfer, engine: Engine) -> tuple[Value | None, Failure | None]:
        value, failure = self._parcels.pop((command.id, command.source, command.target))
        return (None if value is None else engine.copy(value)), failure

    def host_store(self) -> int:
        return 0

    def join_store(self, host: str, port: int, name: str) -> None:
        """In one process nothing has to be found."""
