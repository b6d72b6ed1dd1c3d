"""Fair queueing of clients: a limit on each client's unfinished work on a worker, so that no client waits long.

Instructions are queued before they are planned, because planning fixes the order of commands, and workers never reorder
them. A client's instructions are planned while no worker has more than the client's allowance unfinished. Workers
report when they have reached a mark, and how long that took. A mark is sent for a share of the allowance, not for each
turn: the report of every worker costs the dispatcher as much as several ops.
"""

from __future__ import annotations

from collections import Counter, deque
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
MARKED_SHARE = 0.25  # of the allowance: so much work follows a mark before the next one
ALONE_FACTOR = 32  # multiplies the allowance of a client that is alone: only a later client could wait for it


class Turn(NamedTuple):
    """Instructions of one client that are planned together."""

    session: int
    batch: list[Instruction]
    buffers: list[Buffer]
    cost: int


class Mark(NamedTuple):
    """A point in the commands of some workers. `costs` is, for each worker that has not reported it, the cost of the
    client's commands since the mark before. `last_cost` is that of the last turn, 0 if the mark does not follow one."""

    number: int
    session: int
    costs: dict[int, int]
    last_cost: int


class _ClientQueue:
    """`allowance` limits the cost of the commands on a worker that are not known to be done. `unmarked` is the part of
    that cost that follows the last mark, by worker. `pace` is the duration of a unit in nanoseconds, as reported by
    workers."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Instruction, Buffer | None]] = deque()
        self.unmarked: dict[int, int] = {}
        self.allowance = FIRST_UNITS
        self.pace = 0.0
        self._unfinished: dict[int, int] = {}  # cost by worker
        self._workers_at: Counter[int] = Counter()  # the number of workers with each cost: few costs, many workers

    def start(self, worker: int, cost: int) -> None:
        self.unmarked[worker] = self.unmarked.get(worker, 0) + cost
        self._add(worker, cost)

    def finish(self, worker: int, cost: int) -> None:
        self._add(worker, -cost)

    def lose_worker(self, worker: int) -> None:
        self.unmarked.pop(worker, None)
        self._add(worker, -self._unfinished.get(worker, 0))

    def _add(self, worker: int, cost: int) -> None:
        before = self._unfinished.pop(worker, 0)
        if before:
            self._workers_at[before] -= 1
            if not self._workers_at[before]:
                del self._workers_at[before]
        if after := before + cost:
            self._unfinished[worker] = after
            self._workers_at[after] += 1

    def busy_workers(self) -> set[int]:
        """The workers with unfinished work."""
        return set(self._unfinished)

    def remaining_cost(self, factor: int) -> float:
        """The cost that may still be started, with the allowance multiplied by `factor`. A client without unfinished
        work may always start one instruction."""
        most = max(self._workers_at, default=0)
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
        self._waiting: dict[int, None] = {}  # sessions with queued instructions, in the order of their turns
        self._marks: dict[int, Mark] = {}
        self._last_mark = 0

    def add(self, session: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None:
        if not batch:
            return
        remaining = iter(buffers)
        waiting = self._clients.setdefault(session, _ClientQueue()).waiting
        for instruction in batch:
            waiting.append((instruction, next(remaining) if type(instruction) in PAYLOAD_RECORDS else None))
        self._waiting.setdefault(session)

    def is_waiting(self, session: int) -> bool:
        return session in self._waiting

    def next(self) -> Turn | None:
        """The next instructions to plan, of each client in turn; None if all clients have to wait."""
        factor = self._factor()
        for ident in list(self._waiting):
            session = self._state.sessions.get(ident)
            if session is None:
                self.forget_session(ident)
                continue
            client = self._clients[ident]
            if (remaining := client.remaining_cost(factor)) > 0:
                turn = self._take(session, client.waiting, min(remaining, max(factor * client.allowance / 2, 1.0)))
                del self._waiting[ident]
                if client.waiting:
                    self._waiting[ident] = None  # the others come first next time
                return turn
        return None

    def _factor(self) -> int:
        return ALONE_FACTOR if len(self._state.sessions) == 1 else 1

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
            if self._state.shared:
                nbytes += sum(self._shared_bytes(ident) for ident in instruction.inputs)
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

    def _shared_bytes(self, ident: int) -> int:
        """The bytes that a worker holds of a tensor whose memory counts as that of another one."""
        tensor = self._state.tensors.get(ident)
        if tensor is None or tensor.nbytes or ident not in self._state.shared:
            return 0
        return tensor.meta.nbytes // tensor.spec.mesh.size

    def begin(self, turn: Turn, workers: Sequence[int]) -> Mark | None:
        """Note that a turn was sent to workers; returns a mark for those of them that are to report now."""
        client = self._clients[turn.session]
        for worker in workers:
            client.start(worker, turn.cost)
        share = MARKED_SHARE * self._factor() * client.allowance
        due = [worker for worker in workers if client.unmarked[worker] >= share]
        return self._mark(turn.session, due, turn.cost) if due else None

    def overdue_marks(self) -> list[Mark]:
        """Marks for the clients that have to wait: nothing else would tell when their last commands are done."""
        factor = self._factor()
        clients = [(session, self._clients[session]) for session in self._waiting]
        blocked = [(session, client) for session, client in clients if client.remaining_cost(factor) <= 0]
        return [self._mark(session, list(client.unmarked), 0) for session, client in blocked if client.unmarked]

    def _mark(self, session: int, workers: Sequence[int], last_cost: int) -> Mark:
        unmarked = self._clients[session].unmarked
        self._last_mark += 1
        mark = Mark(self._last_mark, session, {worker: unmarked.pop(worker) for worker in workers}, last_cost)
        self._marks[mark.number] = mark
        return mark

    def finish(self, worker: int, number: int, nanoseconds: int) -> None:
        """A worker has reached a mark. Marks of sessions that have ended are ignored."""
        mark = self._marks.get(number)
        if number > self._last_mark or (mark is not None and worker not in mark.costs):
            raise ProtocolError(f"worker {worker} was not given mark {number}")
        if mark is None:
            return
        client = self._clients[mark.session]
        client.finish(worker, self._drop(mark, worker))
        if mark.last_cost:
            client.note_pace(nanoseconds / mark.last_cost)

    def _drop(self, mark: Mark, worker: int) -> int:
        """Wait no longer for a worker to reach a mark; returns the cost of its commands before the mark."""
        cost = mark.costs.pop(worker)
        if not mark.costs:
            del self._marks[mark.number]
        return cost

    def lose_worker(self, worker: int) -> None:
        """A lost worker has nothing unfinished."""
        for mark in [mark for mark in self._marks.values() if worker in mark.costs]:
            self._drop(mark, worker)
        for client in self._clients.values():
            client.lose_worker(worker)

    def forget_session(self, session: int) -> None:
        self._clients.pop(session, None)
        self._waiting.pop(session, None)
        for mark in [mark for mark in self._marks.values() if mark.session == session]:
            del self._marks[mark.number]

    def queued(self) -> dict[int, int]:
        """The number of queued instructions of each session that has any."""
        return {session: len(self._clients[session].waiting) for session in list(self._waiting)}

    def waits(self) -> dict[int, set[int]]:
        """By session with queued instructions, the workers whose progress it waits for."""
        return {session: self._clients[session].busy_workers() for session in self._waiting}
