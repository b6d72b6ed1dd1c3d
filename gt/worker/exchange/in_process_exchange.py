"""Exchanges between the virtual workers of one process: boxes are read where they lie.

The cost of a worker does not grow with their number: a value that several workers get is computed once and copied, and
addends that several workers take boxes of are reduced once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from gt.worker.engines.engine import Value
from gt.worker.exchange.interface import Exchanging, MoveResult, MoveTask, Work
from gt.worker.exchange.local_steps import LocalStep
from gt.worker.failed_value import FailedValue

_Holders: TypeAlias = tuple[int, ...]
_Yielded: TypeAlias = Sequence[MoveTask]


class InProcessExchange:
    """The transport of virtual workers. `run_interleaved` runs their exchanges, so `begin` is never called."""

    can_prefetch = False
    flags = None

    def begin(self, tasks: Sequence[MoveTask]) -> Work:
        raise AssertionError("run_interleaved runs the exchanges of virtual workers")

    def overlaps(self, tasks: Sequence[MoveTask]) -> bool:
        return False

    def begins_early(self, tasks: Sequence[MoveTask]) -> bool:
        return False

    def prefetch(self, step: LocalStep) -> None:
        """Values need no time to arrive."""

    def required_workers(self, members: Sequence[int]) -> tuple[int, ...]:
        return tuple(members)

    def way_of(self, step: LocalStep) -> str:
        return "memory"

    def ways(self) -> dict[str, int]:
        return {}

    def host_store(self) -> int:
        return 0

    def join_store(self, host: str, port: int, worker: int, token: str = "") -> None:
        """Workers of one process need no store."""

    def lose_worker(self, worker: int) -> None:
        """No exchange waits."""

    def leave(self) -> None:
        """There are no connections."""


def run_interleaved(computations: Mapping[int, Exchanging]) -> None:
    """Run the computations of several virtual workers to their ends, each until it has to wait for another one."""
    waiting: dict[int, _Yielded] = {}
    for worker, computation in computations.items():
        _advance(worker, computation, None, waiting)
    while waiting:
        ready = next((tasks for tasks in waiting.values() if _have_all_come(tasks, waiting)), None)
        assert ready is not None, f"workers {sorted(waiting)} wait for each other"
        members = ready[0].step.members
        columns = zip(*[waiting.pop(member) for member in members], strict=True)
        results = [exchange_in_process(dict(zip(members, column, strict=True))) for column in columns]
        for member in members:
            _advance(member, computations[member], [column[member] for column in results], waiting)


def _have_all_come(tasks: _Yielded, waiting: Mapping[int, _Yielded]) -> bool:
    members = tasks[0].step.members
    return all(member in waiting and waiting[member][0].step.members == members for member in members)


def _advance(
    worker: int, computation: Exchanging, results: Sequence[MoveResult] | None, waiting: dict[int, _Yielded]
) -> None:
    """Run a computation to its next exchange."""
    try:
        waiting[worker] = next(computation) if results is None else computation.send(results)
    except StopIteration:
        return


def exchange_in_process(tasks: Mapping[int, MoveTask]) -> dict[int, MoveResult]:
    """The results of one task of each member. No result shares memory with a value, or with another result."""
    failed = {worker: task.value for worker, task in tasks.items() if isinstance(task.value, FailedValue)}
    recipes = {task.step.recipe: task.step.holders for task in tasks.values()}
    reduced_for = Counter(holders for holders in recipes.values() if holders)
    made: dict[object, Value] = {}
    totals: dict[_Holders, Value] = {}
    results: dict[int, MoveResult] = {}
    for worker, task in tasks.items():
        step = task.step
        failure = next((failed[peer] for peer in (worker, *step.peers) if peer in failed), None) if failed else None
        if step.after is None or failure is not None:
            results[worker] = failure if step.after is not None else None
        elif step.recipe in made:
            results[worker] = task.attempt(lambda: task.engine.copy(made[step.recipe]))
        else:
            combine = _combine_shared if reduced_for[step.holders] > 1 else _combine
            results[worker] = task.attempt(lambda: combine(task, tasks, totals))
            if not isinstance(results[worker], FailedValue):
                made[step.recipe] = results[worker]
    return results


def _combine(task: MoveTask, tasks: Mapping[int, MoveTask], totals: dict[_Holders, Value]) -> Value:
    taken_boxes = [box for addend in task.step.addends for box in addend]
    boxes = {box.peer: tasks[box.peer].box(box.source) for box in taken_boxes}
    return task.step.combine(task.engine, boxes, owned=False)


def _combine_shared(task: MoveTask, tasks: Mapping[int, MoveTask], totals: dict[_Holders, Value]) -> Value:
    """This worker's box of a total that other workers take boxes of too: the total is computed once, in `totals`."""
    step = task.step
    if step.holders not in totals:
        totals[step.holders] = step.reduce(task.engine, [tasks[holder].value for holder in step.holders])
    assert step.after is not None
    box = task.engine.empty(step.after)
    box[...] = totals[step.holders][step.addends[0][0].source]
    return box
