"""The interface of transports, and the values that a worker sends and receives in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Engine, Value
from gt.worker.failed_value import FailedValue


class Swap(NamedTuple):
    """One exchange among `members`, as one of them takes part in it.

    `sends` maps each receiver to a value and to the meta that the receiver expects; `receives` maps each sender to the
    meta of its value. A `FailedValue` is sent in place of a tensor that could not be computed, so that no receiver
    waits for it.
    """

    members: tuple[int, ...]
    sends: Mapping[int, tuple[TensorMeta, Value | FailedValue]]
    receives: Mapping[int, TensorMeta]


ReceivedValues: TypeAlias = dict[int, "Value | FailedValue"]
"""Values by the worker that sent them."""

Swapping: TypeAlias = Generator[Swap, ReceivedValues, Any]
"""A computation that yields every exchange it needs, and is resumed with the values received."""


LookAhead: TypeAlias = Callable[[], None]
"""Called repeatedly while an exchange waits for its members: receives messages about lost workers and passes them on to
`Exchange.lose_worker`. Raises where this worker has no reason to wait, because it ends or its server is lost."""


class Work(Protocol):
    """An exchange that has begun."""

    def finish(self) -> ReceivedValues:
        """Wait for the values that this worker receives. Raises the first error, after all peers were served."""


class Exchange(Protocol):
    """A transport between workers."""

    def begin(self, swap: Swap, engine: Engine) -> Work:
        """Start to send and to receive. All members begin their exchanges in the same order."""

    @property
    def can_prefetch(self) -> bool:
        """Whether `prefetch` has an effect now."""

    def prefetch(self, swap: Swap) -> None:
        """Start to receive the values of a later swap: the next one in which this worker receives any."""

    def required_workers(self, swap: Swap) -> tuple[int, ...]:
        """The workers without which a swap fails."""

    def host_store(self) -> int:
        """Start the store by which workers find each other; returns its port."""

    def join_store(self, host: str, port: int, worker: int) -> None:
        """Connect to the store that `worker` hosts."""

    def lose_worker(self, worker: int) -> None:
        """The dispatcher has lost a worker: no exchange waits for it to come."""

    def leave(self) -> None:
        """Drop all connections: this worker goes on under another id."""
