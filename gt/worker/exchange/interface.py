"""The interface of transports, and the tasks that a worker gives them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.deferred_failure_flags import DeferredFailureFlags
from gt.worker.exchange.local_steps import LocalStep, Slices
from gt.worker.failed_value import Fail, FailedValue

MoveResult: TypeAlias = "Value | FailedValue | None"
"""A worker's part of a tensor after a step; None if the worker gets no part of it."""


class MoveTask(NamedTuple):
    """A step of a move for one worker to do: `value` is its part of the tensor before the step, made by `engine`. A
    `FailedValue` takes the place of a tensor that could not be computed, so that no member waits for it. `fail` reports
    an exception of this worker."""

    engine: Engine
    step: LocalStep
    value: Value | FailedValue | None
    fail: Fail

    def box(self, slices: Slices) -> Value:
        """A box of the value, which has not failed."""
        return self.value[slices]  # type: ignore[index]

    def attempt(self, compute: Callable[[], Value]) -> Value | FailedValue:
        """The value that a function returns, or the reported failure of it."""
        return attempt(compute, self.fail)


def attempt(compute: Callable[[], Value], fail: Fail) -> Value | FailedValue:
    """The value that a function of a move returns, or the reported failure of it."""
    try:
        return compute()
    except Exception as error:  # most likely the device is out of memory
        return fail("redistribute", (), error)


class Work(Protocol):
    """An exchange that has begun."""

    def finish(self) -> Sequence[MoveResult]:
        """Wait for the parts that this worker gets. Raises an error of the whole exchange, such as a lost member. Where
        a member has no value for a task, the result of that task is a FailedValue."""


class EarlyTasks(tuple[MoveTask, ...]):
    """Tasks whose results are needed later: the computation may be resumed with a Work in place of them. It finishes
    the work before it yields other tasks, but for EarlyTasks that follow at once; and the work does not raise."""


Exchanging: TypeAlias = Generator[Sequence[MoveTask], "Sequence[MoveResult] | Work", Any]
"""A computation that yields the tasks of every exchange it needs, which have the same members, and is resumed with
their results."""


def run_exchanges(
    computation: Exchanging,
    exchange_tasks: Callable[[Sequence[MoveTask]], Sequence[MoveResult] | Work],
    results: Sequence[MoveResult] | Work | None = None,
) -> None:
    """Run a computation to its end; `exchange_tasks` does its exchanges. `results` are those of the exchange that the
    computation waits for; None if it has not started."""
    try:
        while True:
            results = exchange_tasks(computation.send(results))  # type: ignore[arg-type]
    except StopIteration:
        return


LookAhead: TypeAlias = Callable[[], None]
"""Called repeatedly while an exchange waits for its members: receives messages about lost workers and passes them on to
`Exchange.lose_worker`. Raises where this worker has no reason to wait, because it ends or its server is lost."""


class Exchange(Protocol):
    """A transport between workers."""

    def begin(self, tasks: Sequence[MoveTask]) -> Work:
        """Start tasks with the same members, as one exchange. All members begin their exchanges in the same order."""

    @property
    def flags(self) -> DeferredFailureFlags | None:
        """Flags that were not read, of workers that do not wait for their device; None for others."""

    def overlaps(self, tasks: Sequence[MoveTask]) -> bool:
        """Whether an exchange that has begun goes on by itself, so that the worker may compute before it finishes it,
        and may finish it after later ones."""

    def begins_early(self, tasks: Sequence[MoveTask]) -> bool:
        """Whether an exchange that has begun goes on by itself, if it is finished before later ones begin."""

    @property
    def can_prefetch(self) -> bool:
        """Whether `prefetch` has an effect now."""

    def prefetch(self, step: LocalStep) -> None:
        """Start to receive the values of the next exchange in which this worker receives any."""

    def required_workers(self, members: Sequence[int]) -> tuple[int, ...]:
        """The workers without which an exchange among `members` fails."""

    def way_of(self, step: LocalStep) -> str:
        """The way in which a step was exchanged, such as "shared memory" or "gloo all-reduce"."""

    def ways(self) -> dict[str, int]:
        """The number of exchanges by their way."""

    def host_store(self) -> int:
        """Start the store by which workers find each other; returns its port."""

    def join_store(self, host: str, port: int, worker: int, token: str = "") -> None:
        """Connect to the store that `worker` hosts. All workers that were introduced to each other know its `token`."""

    def lose_worker(self, worker: int) -> None:
        """The dispatcher has lost a worker: no exchange waits for it to come."""

    def leave(self) -> None:
        """Drop all connections: this worker goes on under another id."""
