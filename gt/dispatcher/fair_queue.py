"""Fair queueing of clients: a limit on each client's unfinished work on a worker, so that no client waits long.

Instructions are queued before they are planned, because planning fixes the order of commands, and workers never reorder
them. A client's instructions are planned while no worker has more than the client's allowance unfinished. Workers
report when they have reached a mark, and how long that took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gt.core.errors import ProtocolError
from gt.core.message_fields import PAYLOAD_RECORDS
from gt.core.messages import CreateTensor, FetchTensor, Instruction, QueryOp, Redistribute, RunOp, RunSegment
from gt.dispatcher.session_records import SessionRecord
from gt.dispatcher.state import State
from gt.wire.codec import Buffer

# Cost is counted in units: one for each instruction, and one for each UNIT_BYTES that it reads or makes.
# Both take a worker about 10 us.
UNIT_BYTES = 1 << 16
FIRST_UNITS = 32.0  # allowance of a client before the duration of a unit is known
MAX_UNITS = 512.0  # largest allowance
TARGET_NANOSECONDS = 50e6  # of unfinished work that a client should have on a worker
ALONE_FACTOR = 32  # multiplies the allowance of a client that is alone: only a later client could wait for it


class Turn(NamedTuple):
    """Instructions of one client that are planned together."""

    session: int
    batch: list[Instruction]
    buffers: list[Buffer]
    cost: int


class _UnfinishedTurn(NamedTuple):
    """A turn that some workers have not finished."""

    session: int
    cost: int
    workers: set[int]


class _ClientQueue:
    """`unfinished` is the cost of the commands on each worker that are not known to be done, and `allowance` its limit.
    `pace` is the duration of a unit in nanoseconds, as reported by workers."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Instruction, Buffer | None]] = deque()
        self.unfinished: dict[int, int] = {}
        self.allowance = FIRST_UNITS
        self.pace = 0.0

    def remaining_cost(self, factor: int) -> float:
        """The cost that may still be started, with the allowance multiplied by `factor`. A client without unfinished
        work may always start one instruction."""
        most = max(self.unfinished.values(), default=0)
        return max(factor * self.allowance, 1.0) if not most else factor * self.allowance - most

    def note_pace(self, pace: float) -> None:
        """A slower pace is used immediately, a faster one gradually."""
        self.pace = max(pace, (self.pace + pace) / 2)
        enough = TARGET_NANOSECONDS / self.pace if self.pace else MAX_UNITS
        self.allowance = min(2 * self.allowance, enough, MAX_UNITS)


class FairQueue:
    """`state` gives the sizes of tensors, from which the cost of an instruction follows."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._clients: dict[int, _ClientQueue] = {}
        self._marks: dict[int, _UnfinishedTurn] = {}
        self._last_mark = 0

    def add(self, session: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None:
        remaining = iter(buffers)
        waiting = self._clients.setdefault(session, _ClientQueue()).waiting
        for instruction in batch:
            waiting.append((instruction, next(remaining) if type(instruction) in PAYLOAD_RECORDS else None))

    def is_waiting(self, session: int) -> bool:
        client = self._clients.get(session)
        return client is not None and bool(client.waiting)

    def next(self) -> Turn | None:
        """The next instructions to plan, of each client in turn; None if all clients have to wait."""
        factor = ALONE_FACTOR if len(self._state.sessions) == 1 else 1
        for ident, client in list(self._clients.items()):
            session = self._state.sessions.get(ident)
            if session is None:
                self.forget_session(ident)
            elif client.waiting and (remaining := client.remaining_cost(factor)) > 0:
                self._clients[ident] = self._clients.pop(ident)  # the others come first next time
                return self._take(session, client.waiting, min(remaining, max(factor * client.allowance / 2, 1.0)))
        return None

    def _take(self, session: SessionRecord, waiting: deque[tuple[Instruction, Buffer | None]], limit: float) -> Turn:
        """Take at most half of a client's allowance, so that it goes on while workers do the other half."""
        turn, cost = Turn(session.ident, [], [], 0), 0
        while waiting and cost < limit:
            more = self._cost(session, waiting[0][0])
            if cost and cost + more > limit:
                break
            instruction, buffer = waiting.popleft()
            cost += more
            turn.batch.append(instruction)
            if buffer is not None:
                turn.buffers.append(buffer)
        return turn._replace(cost=cost)

    def _cost(self, session: SessionRecord, instruction: Instruction) -> int:
        tensors = self._state.tensors
        if isinstance(instruction, RunOp | QueryOp):
            op = session.ops.get(instruction.op_id)
            nbytes = sum(tensors[ident].nbytes for ident in instruction.inputs if ident in tensors)
            return 1 + (nbytes + (op.nbytes if op is not None else 0)) // UNIT_BYTES
        if isinstance(instruction, RunSegment):
            segment = session.segments.get(instruction.segment_id)
            nbytes = sum(tensors[ident].nbytes for ident in instruction.externals if ident in tensors)
            return 1 if segment is None else len(segment.body.ops) + (nbytes + 2 * segment.nbytes) // UNIT_BYTES
        if isinstance(instruction, CreateTensor):
            return 1 + instruction.meta.nbytes // UNIT_BYTES
        if isinstance(instruction, FetchTensor | Redistribute):
            ident = instruction.id if isinstance(instruction, FetchTensor) else instruction.input
            return 1 + (tensors[ident].nbytes if ident in tensors else 0) // UNIT_BYTES
        return 0

    def begin(self, turn: Turn, workers: Sequence[int]) -> int:
        """Note that a turn was sent to workers; returns the mark at which each of them reports progress."""
        self._last_mark += 1
        self._marks[self._last_mark] = _UnfinishedTurn(turn.session, turn.cost, set(workers))
        unfinished = self._clients[turn.session].unfinished
        for worker in workers:
            unfinished[worker] = unfinished.get(worker, 0) + turn.cost
        return self._last_mark

    def finish(self, worker: int, mark: int, nanoseconds: int) -> None:
        """A worker has reached a mark. Marks of sessions that have ended are ignored."""
        found = self._marks.get(mark)
        if mark > self._last_mark or (found is not None and worker not in found.workers):
            raise ProtocolError(f"worker {worker} was not given mark {mark}")
        if found is None:
            return
        self._discharge(mark, found, worker)
        client = self._clients.get(found.session)
        if client is not None:
            client.note_pace(nanoseconds / found.cost)

    def _discharge(self, mark: int, found: _UnfinishedTurn, worker: int) -> None:
        found.workers.discard(worker)
        if not found.workers:
            del self._marks[mark]
        client = self._clients.get(found.session)
        if client is not None:
            client.unfinished[worker] -= found.cost

    def lose_worker(self, worker: int) -> None:
        """A lost worker has nothing unfinished."""
        for mark, found in list(self._marks.items()):
            if worker in found.workers:
                self._discharge(mark, found, worker)

    def forget_session(self, session: int) -> None:
        self._clients.pop(session, None)
        for mark in [mark for mark, found in self._marks.items() if found.session == session]:
            del self._marks[mark]

    def waits(self) -> dict[int, set[int]]:
        """By session with queued instructions, the workers whose progress it waits for."""
        waiting = {session: client for session, client in self._clients.items() if client.waiting}
        return {
            session: {worker for worker, cost in client.unfinished.items() if cost}
            for session, client in waiting.items()
        }
