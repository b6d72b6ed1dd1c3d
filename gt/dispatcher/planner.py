"""Where an op runs and what has to move first. Pure: reads the state, changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from gt.dispatcher.state import State


class Move(NamedTuple):
    ident: int
    source: int
    target: int


class Plan(NamedTuple):
    worker: int
    moves: tuple[Move, ...]


class LostInput(Exception):
    """An input went with a worker that died."""

    def __init__(self, ident: int, worker: int) -> None:
        super().__init__(f"tensor {ident} was lost with worker {worker}")
        self.ident = ident
        self.worker = worker


class NoWorkers(Exception):
    """Every worker is gone."""


def plan_op(state: State, inputs: Sequence[int], writes: Sequence[int]) -> Plan:
    """An op runs where its inputs are; where they are apart, they meet where the fewest bytes move. An op that writes
    runs where the tensor is that it writes to first."""
    if not inputs:
        return _stay(least_loaded(state))
    homes = state.homes
    try:
        first = homes[inputs[0]]
        if not writes:
            for ident in inputs:
                if homes[ident] != first:
                    return _meet(state, inputs)
            return _stay(first[0])
        worker = homes[inputs[writes[0]]][0]
        for ident in inputs:
            if worker not in homes[ident]:
                return Plan(worker, _moves(state, inputs, worker))
    except KeyError:
        raise _missing(state, inputs) from None
    return _stay(worker)


@functools.cache
def _stay(worker: int) -> Plan:
    """Nothing moves: nearly every plan, so they are made once."""
    return Plan(worker, ())


def least_loaded(state: State) -> int:
    """The worker that holds the fewest bytes, the lowest id among equals."""
    workers = state.workers
    if len(workers) == 1:
        return next(iter(workers))
    ready = [ident for ident, worker in workers.items() if worker.ready]
    if not ready:
        raise NoWorkers
    return min(ready, key=lambda ident: (workers[ident].resident, ident))


def _meet(state: State, inputs: Sequence[int]) -> Plan:
    homes, metas = state.homes, state.metas
    distinct = dict.fromkeys(inputs)
    candidates = {worker for ident in distinct for worker in homes[ident]}

    def moved(worker: int) -> int:
        return sum(metas[ident].nbytes for ident in distinct if worker not in homes[ident])

    worker = min(candidates, key=lambda candidate: (moved(candidate), candidate))
    return Plan(worker, _moves(state, inputs, worker))


def _moves(state: State, inputs: Sequence[int], worker: int) -> tuple[Move, ...]:
    absent = [ident for ident in dict.fromkeys(inputs) if worker not in state.homes[ident]]
    return tuple([Move(ident, state.homes[ident][0], worker) for ident in absent])


def _missing(state: State, inputs: Sequence[int]) -> Exception:
    for ident in inputs:
        if ident in state.lost:
            return LostInput(ident, state.lost[ident])
    return KeyError(next(ident for ident in inputs if ident not in state.homes))
