"""Fair queueing of clients: a limit on each client's unfinished work on a worker, so that no client waits long, and on
that of all clients of a key, so that a user with many clients does not keep those of others waiting.

Instructions are queued before they are planned, because planning fixes the order of commands, and workers never reorder
them. A client's instructions are planned while no worker has more than the client's allowance unfinished. Workers
report when they have reached a mark, and how long that took. A mark is sent for a share of the allowance, not for each
turn: the report of every worker costs the dispatcher as much as several ops.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from gt.core.errors import ProtocolError
from gt.core.message_fields import PAYLOAD_RECORDS
from gt.core.messages import CreateTensor, FetchTensor, Instruction, QueryOp, Redistribute, RunOp, RunProgram
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.wire.codec import Buffer

# Cost is counted in units: one for each instruction, and one for each UNIT_BYTES that it reads or makes.
# Both take a worker about 10 us.
UNIT_BYTES = 1 << 16
FIRST_UNITS = 32.0  # allowance of a client before the duration of a unit is known
MAX_UNITS = 512.0  # largest allowance
TARGET_NANOSECONDS = 50e6  # target for the unfinished work of a client, and of all clients of a key, on a worker
MARKED_SHARE = 0.25  # work between two marks, as a share of the allowance
ACTIVE_CLIENTS = 8  # clients of a key that may have unfinished work at any cost
ALONE_FACTOR = 32  # multiplies the allowance of a client that is alone: only a later client could wait for it


class Turn(NamedTuple):
    """Instructions of one client that are planned together."""

    session: int
    batch: list[Instruction]
    buffers: list[Buffer]
    cost: int


class Mark(NamedTuple):
    """A point in the commands of some workers. `costs` is, for each worker that has not reported it, the cost of the
    client's commands since the mark before. `last_cost` is that of the last turn, 0 if the mark does not follow one.
    One without a `session` follows the commands of clients of a key that have left, `last_cost` in number."""

    number: int
    session: int | None
    key: str
    costs: dict[int, int]
    last_cost: int


class _KeyQueue:
    """The clients of a key. `busy` are the expected nanoseconds of their commands on each worker that are not known to
    be done, with those of `left` clients, for which no mark was sent. Clients that are `active`, and a number of
    `departed` ones, have such commands. `pace` is that of the client that reported last."""

    def __init__(self) -> None:
        self.clients: dict[int, _ClientQueue] = {}
        self.waiting: dict[int, None] = {}  # sessions with queued instructions, in the order of their turns
        self.busy: Counter[int] = Counter()
        self.left: Counter[int] = Counter()
        self.active: set[_ClientQueue] = set()
        self.departed = self.leaving = 0  # the first have a mark, or wait for one: the second
        self.pace = TARGET_NANOSECONDS / FIRST_UNITS

    def remaining(self, client: _ClientQueue, workers: Collection[int]) -> float:
        """The nanoseconds of work that a client may still start on workers: any, if nothing is unfinished there. One
        that is idle may start something beside a few others."""
        if client not in self.active and len(self.active) + self.departed + self.leaving < ACTIVE_CLIENTS:
            return math.inf
        most = max(self.busy[worker] for worker in workers)
        return TARGET_NANOSECONDS - most if most else math.inf

    def release(self, worker: int, nanoseconds: int) -> None:
        self.busy[worker] -= nanoseconds
        if not self.busy[worker]:
            del self.busy[worker]

    def forget(self, session: int) -> None:
        """A client has left. What its workers were sent is done all the same."""
        self.waiting.pop(session, None)
        client = self.clients.pop(session, None)
        if client is not None and client.expected:
            self.left.update(client.expected)
            self.active.discard(client)
            self.leaving += 1


class _ClientQueue:
    """Queues the instructions of one client. `allowance` limits the cost of its commands on a worker that are not known
    to be done, and `expected` are the nanoseconds that these take. `unmarked` is the part of that cost after the last
    mark, by worker. `pace` is the duration of a unit in nanoseconds, as reported by workers."""

    def __init__(self, key: _KeyQueue) -> None:
        self.key = key
        self.waiting: deque[tuple[Instruction, Buffer | None]] = deque()
        self.unmarked: dict[int, int] = {}
        self.allowance = FIRST_UNITS
        self.pace = 0.0
        self.expected: dict[int, int] = {}
        self._unfinished: dict[int, int] = {}  # cost by worker
        self._workers_at: Counter[int] = Counter()  # the number of workers with each cost: few costs, many workers

    @property
    def expected_pace(self) -> float:
        return self.pace or self.key.pace

    def start(self, worker: int, cost: int) -> None:
        self.unmarked[worker] = self.unmarked.get(worker, 0) + cost
        self._add(worker, cost)
        nanoseconds = math.ceil(cost * self.expected_pace)
        self.expected[worker] = self.expected.get(worker, 0) + nanoseconds
        self.key.busy[worker] += nanoseconds
        self.key.active.add(self)

    def finish(self, worker: int, cost: int) -> None:
        done = self.expected[worker] * cost // self._unfinished[worker]  # all of it with the last of the cost
        self.key.release(worker, done)
        self.expected[worker] -= done
        self._add(worker, -cost)
        if worker not in self._unfinished:
            del self.expected[worker]
        if not self.expected:
            self.key.active.discard(self)

    def lose_worker(self, worker: int) -> None:
        self.unmarked.pop(worker, None)
        self.expected.pop(worker, None)
        self._add(worker, -self._unfinished.get(worker, 0))
        if not self.expected:
            self.key.active.discard(self)

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
        self.pace = self.key.pace = max(pace, (self.pace + pace) / 2)
        enough = TARGET_NANOSECONDS / self.pace if self.pace else MAX_UNITS
        self.allowance = min(2 * self.allowance, enough, MAX_UNITS)


class FairQueue:
    """Queues instructions of sessions by cost, which follows from the sizes of tensors in `state`."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._clients: dict[int, _ClientQueue] = {}
        self._keys: dict[str, _KeyQueue] = {}  # ordered by turn
        self._marks: dict[int, Mark] = {}
        self._last_mark = 0

    def add(self, session: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None:
        if not batch:
            return
        remaining = iter(buffers)
        client = self._client(session)
        for instruction in batch:
            client.waiting.append((instruction, next(remaining) if type(instruction) in PAYLOAD_RECORDS else None))
        client.key.waiting.setdefault(session)

    def _client(self, ident: int) -> _ClientQueue:
        if ident not in self._clients:
            session = self._state.sessions.get(ident)
            key = self._keys.setdefault(session.key if session is not None else "", _KeyQueue())
            self._clients[ident] = key.clients[ident] = _ClientQueue(key)
        return self._clients[ident]

    def is_waiting(self, session: int) -> bool:
        return session in self._clients and session in self._clients[session].key.waiting

    def next(self) -> Turn | None:
        """The next instructions to plan, of each key in turn, and of each client of a key; None if all have to wait."""
        factor = self._factor()
        for name, key in list(self._keys.items()):
            if key.waiting and (turn := self._next_of(key, factor)) is not None:
                self._keys[name] = self._keys.pop(name)  # the others come first next time
                return turn
        return None

    def _next_of(self, key: _KeyQueue, factor: int) -> Turn | None:
        for ident in list(key.waiting):
            session = self._state.sessions.get(ident)
            if session is None:
                self.forget_session(ident)
                continue
            client = key.clients[ident]
            if (remaining := self._remaining(session, client, factor)) > 0:
                turn = self._take(session, client.waiting, min(remaining, max(factor * client.allowance / 2, 1.0)))
                del key.waiting[ident]
                if client.waiting:
                    key.waiting[ident] = None
                return turn
        return None

    def _remaining(self, session: SessionRecord, client: _ClientQueue, factor: int) -> float:
        """The cost that a client may still start, as far as its key may on the workers that it has used. A client that
        is alone has all of its key."""
        remaining = client.remaining_cost(factor)
        if remaining <= 0 or factor > 1 or not client.key.busy:
            return remaining
        workers = session.workers & self._state.workers.keys()
        groups = [workers] if workers else [{worker} for worker in self._state.workers]
        of_key = max((client.key.remaining(client, group) for group in groups), default=math.inf)
        return min(remaining, max(of_key / client.expected_pace, 1.0)) if of_key > 0 else 0.0

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
        if isinstance(instruction, RunProgram):
            record = session.programs.get(instruction.program_id)
            nbytes = sum(tensors[ident].nbytes for ident in instruction.inputs if ident in tensors)
            return 1 if record is None else len(record.program.steps) + (nbytes + 2 * record.nbytes) // UNIT_BYTES
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
        """Marks for the clients that have to wait, or for which others of their key do: nothing else would tell when
        their last commands are done."""
        factor, marks = self._factor(), []
        for name, key in self._keys.items():
            blocked = [session for session in key.waiting if key.clients[session].remaining_cost(factor) <= 0]
            for session in blocked if len(blocked) == len(key.waiting) else key.clients:
                if unmarked := key.clients[session].unmarked:
                    marks.append(self._mark(session, list(unmarked), 0))
            if key.left and len(blocked) < len(key.waiting):
                marks.append(self._note_mark(Mark(self._last_mark + 1, None, name, dict(key.left), key.leaving)))
                key.left.clear()
                key.departed, key.leaving = key.departed + key.leaving, 0
        return marks

    def _mark(self, session: int, workers: Sequence[int], last_cost: int) -> Mark:
        unmarked = self._clients[session].unmarked
        costs = {worker: unmarked.pop(worker) for worker in workers}
        return self._note_mark(Mark(self._last_mark + 1, session, "", costs, last_cost))

    def _note_mark(self, mark: Mark) -> Mark:
        self._last_mark = mark.number
        self._marks[mark.number] = mark
        return mark

    def finish(self, worker: int, number: int, nanoseconds: int) -> None:
        """A worker has reached a mark. Marks of sessions that have ended are ignored."""
        mark = self._marks.get(number)
        if number > self._last_mark or (mark is not None and worker not in mark.costs):
            raise ProtocolError(f"worker {worker} was not given mark {number}")
        if mark is None:
            return
        if mark.session is None:
            self._keys[mark.key].release(worker, self._drop(mark, worker))
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
            if mark.session is None:
                self._keys[mark.key].departed -= mark.last_cost
        return cost

    def lose_worker(self, worker: int) -> None:
        """A lost worker has nothing unfinished."""
        for mark in [mark for mark in self._marks.values() if worker in mark.costs]:
            self._drop(mark, worker)
        for client in self._clients.values():
            client.lose_worker(worker)
        for key in self._keys.values():
            del key.busy[worker], key.left[worker]

    def forget_session(self, session: int) -> None:
        client = self._clients.pop(session, None)
        if client is not None:
            client.key.forget(session)
        for mark in [mark for mark in self._marks.values() if mark.session == session]:
            del self._marks[mark.number]

    def queued(self) -> dict[int, int]:
        """The number of queued instructions of each session that has any."""
        return {session: len(client.waiting) for session, client in list(self._clients.items()) if client.waiting}

    def waits(self) -> dict[int, set[int]]:
        """By session with queued instructions, the workers whose progress it waits for."""
        waiting = [(session, key) for key in self._keys.values() for session in key.waiting]
        return {session: self._clients[session].busy_workers() or set(key.busy) for session, key in waiting}
