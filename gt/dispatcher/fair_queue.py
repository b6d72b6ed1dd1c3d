"""Turns of clients: how much unfinished work each may have on a worker, so that none has to wait long for another.

Instructions wait here before they are planned, since planning gives commands their one order, which workers never
change. A client goes on as long as each worker has little of its work unfinished; workers report when they have reached
a mark, and how long that took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gt.core.errors import ProtocolError
from gt.core.messages import CreateTensor, FetchTensor, Instruction, QueryOp, Redistribute, RunOp
from gt.dispatcher.outgoing import Buffer
from gt.dispatcher.state import SessionRecord, State

# Cost is counted in units: one for each instruction, and one for so many bytes that it reads or makes.
# Both take a worker about 10 us.
UNIT_BYTES = 1 << 16
FIRST_UNITS = 32.0  # that a client may have unfinished on a worker before it is known how long they take
MOST_UNITS = 512.0  # and however quick they are
TARGET_NANOSECONDS = 50e6  # of unfinished work that a client should have on a worker
ALONE = 32  # times as much may be unfinished where there is no other client, which could only come later


class Turn(NamedTuple):
    """Instructions of one client that are carried out together."""

    session: int
    batch: list[Instruction]
    buffers: list[Buffer]
    cost: int


class _Mark(NamedTuple):
    session: int
    cost: int
    workers: set[int]


class _ClientQueue:
    """`unfinished` is the cost of the work on each worker that is not known to be done, and `allowance` how much that
    may be; `pace` is the nanoseconds that a unit takes, by what workers have reported."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Instruction, Buffer | None]] = deque()
        self.unfinished: dict[int, int] = {}
        self.allowance = FIRST_UNITS
        self.pace = 0.0

    def room(self, times: int) -> float:
        """How much more it may have unfinished, of so many times its allowance. Whatever an instruction costs, one
        alone may always begin."""
        most = max(self.unfinished.values(), default=0)
        return max(times * self.allowance, 1.0) if not most else times * self.allowance - most

    def note_pace(self, pace: float) -> None:
        """Slower work counts at once, quicker work by and by."""
        self.pace = max(pace, (self.pace + pace) / 2)
        enough = TARGET_NANOSECONDS / self.pace if self.pace else MOST_UNITS
        self.allowance = min(2 * self.allowance, enough, MOST_UNITS)


class FairQueue:
    """`state` tells what instructions cost."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._clients: dict[int, _ClientQueue] = {}
        self._marks: dict[int, _Mark] = {}
        self._marked = 0

    def add(self, session: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None:
        remaining = iter(buffers)
        waiting = self._clients.setdefault(session, _ClientQueue()).waiting
        for instruction in batch:
            waiting.append((instruction, next(remaining) if type(instruction) is CreateTensor else None))

    def is_waiting(self, session: int) -> bool:
        client = self._clients.get(session)
        return client is not None and bool(client.waiting)

    def next(self) -> Turn | None:
        """The next instructions that may be carried out, of each client in turn; None where all have to wait."""
        times = ALONE if len(self._state.sessions) == 1 else 1
        for ident, client in list(self._clients.items()):
            session = self._state.sessions.get(ident)
            if session is None:
                self.forget_session(ident)
            elif client.waiting and (room := client.room(times)) > 0:
                self._clients[ident] = self._clients.pop(ident)  # the others come first next time
                return self._take(session, client.waiting, min(room, max(times * client.allowance / 2, 1.0)))
        return None

    def _take(self, session: SessionRecord, waiting: deque[tuple[Instruction, Buffer | None]], room: float) -> Turn:
        """Half of what a client may have unfinished, so that it goes on while workers do the other half."""
        turn, cost = Turn(session.ident, [], [], 0), 0
        while waiting and cost < room:
            more = self._cost(session, waiting[0][0])
            if cost and cost + more > room:
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
            nbytes = sum([tensors[ident].nbytes for ident in instruction.inputs if ident in tensors])
            return 1 + (nbytes + (op.nbytes if op is not None else 0)) // UNIT_BYTES
        if isinstance(instruction, CreateTensor):
            return 1 + instruction.meta.nbytes // UNIT_BYTES
        if isinstance(instruction, FetchTensor | Redistribute):
            ident = instruction.id if isinstance(instruction, FetchTensor) else instruction.input
            return 1 + (tensors[ident].nbytes if ident in tensors else 0) // UNIT_BYTES
        return 0

    def begin(self, turn: Turn, workers: Sequence[int]) -> int:
        """A turn was given to workers; gives the mark at which each of them reports that it is done."""
        self._marked += 1
        self._marks[self._marked] = _Mark(turn.session, turn.cost, set(workers))
        unfinished = self._clients[turn.session].unfinished
        for worker in workers:
            unfinished[worker] = unfinished.get(worker, 0) + turn.cost
        return self._marked

    def finish(self, worker: int, mark: int, nanoseconds: int) -> None:
        """A worker has reached a mark. Those of sessions that have ended are forgotten."""
        found = self._marks.get(mark)
        if mark > self._marked or (found is not None and worker not in found.workers):
            raise ProtocolError(f"worker {worker} was not given mark {mark}")
        if found is None:
            return
        self._discharge(mark, found, worker)
        client = self._clients.get(found.session)
        if client is not None:
            client.note_pace(nanoseconds / found.cost)

    def _discharge(self, mark: int, found: _Mark, worker: int) -> None:
        found.workers.discard(worker)
        if not found.workers:
            del self._marks[mark]
        client = self._clients.get(found.session)
        if client is not None:
            client.unfinished[worker] -= found.cost

    def lose_worker(self, worker: int) -> None:
        """A worker that is gone has nothing unfinished."""
        for mark, found in list(self._marks.items()):
            if worker in found.workers:
                self._discharge(mark, found, worker)

    def forget_session(self, session: int) -> None:
        self._clients.pop(session, None)
        for mark in [mark for mark, found in self._marks.items() if found.session == session]:
            del self._marks[mark]

    def waits(self) -> dict[int, set[int]]:
        """The workers on whose progress each client waits that has to wait."""
        waiting = {session: client for session, client in self._clients.items() if client.waiting}
        return {
            session: {worker for worker, cost in client.unfinished.items() if cost}
            for session, client in waiting.items()
        }
