"""Records when commands ran, for sessions and monitors that ask for a timeline. Its `clock` is also the executor's.

While a recording is on, each command, and each op of a program, costs one reading of the clock: the end of one is the
start of the next. What is recorded is described when it is taken.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

from gt.core.ids import ALL_SESSIONS, session_of
from gt.core.message_fields import id_fields, owner_of
from gt.core.messages import (
    MAX_SAMPLES,
    RAN_AT_ONCE,
    Command,
    QueryOp,
    Ran,
    RunOp,
    RunProgram,
    Swapped,
    WorkerCreateTensor,
    WorkerFetchTensor,
)
from gt.core.program import Program
from gt.worker.exchange.local_steps import LocalStep
from gt.worker.op_descriptions import OpDescription

MAX_NAMED = 16  # inputs, and outputs, that a record of a command names
SAMPLE_NANOSECONDS = 20_000_000  # between two samples of the memory

# by command: its name in a timeline, None if it is not recorded; a command that declares none fails here
TIMELINE_NAMES: dict[type, str | None] = {kind: kind.timeline_name for kind in get_args(Command)}


class DescribeOps(Protocol):
    """Describes ops, programs and scopes by their ids."""

    def describe_op(self, op_id: int) -> OpDescription: ...
    def describe_program(self, program_id: int) -> tuple[Program, Sequence[OpDescription]]: ...
    def describe_scope(self, session: int, scope: int) -> str: ...


_Step = TypeVar("_Step", bound=tuple[Any, ...])
OpTime: TypeAlias = tuple[range, int, int]
"""The positions of ops of a program, their start and their end. Several ops are one piece of compiled code."""

StepTimes: TypeAlias = tuple[Sequence[tuple[Any, ...]] | range, list[int]]
"""Steps of a program that ran one after the other, each with the position of its op as the last field, and the times
between them: one more than steps that have ended. A range is that of the ops in one piece of compiled code."""


class TimedCommand(NamedTuple):
    """A command as it was recorded. Its swaps come with the sessions that they belong to; a swap that no command has
    waited for is recorded with None."""

    command: Command | None
    start: int
    end: int
    swaps: Sequence[tuple[int, Swapped]]
    steps: Sequence[StepTimes]

    @property
    def op_times(self) -> Iterator[OpTime]:
        """The ops of a program that have ended."""
        for steps, times in self.steps:
            if isinstance(steps, range):
                yield steps, times[0], times[1]
            else:
                for step, start, end in zip(steps, times, times[1:], strict=False):
                    yield range(step[-1], step[-1] + 1), start, end


class _Recording:
    """The recorded commands of one session, or of all; `dropped` counts those that came when `limit` were held.
    `memory` has samples of the bytes that the worker holds, each with its time."""

    def __init__(self) -> None:
        self.limit = 0
        self.ran: deque[Ran] = deque()
        self.dropped = 0
        self.memory: list[tuple[int, int]] = []

    @property
    def is_full(self) -> bool:
        return len(self.ran) >= self.limit

    def add(self, ran: Ran) -> None:
        if self.is_full:
            self.dropped += 1
        else:
            self.ran.append(ran)


class TimelineRecorder:
    """Records when commands ran. `is_on` says whether a timeline is requested: a worker reads it once per batch, so
    that recording costs nothing while it is off. The `listener`, if there is one, gets each command when it has run."""

    def __init__(self, describe: DescribeOps, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.is_on = False
        self._listener: Callable[[TimedCommand], None] | None = None
        self.clock = clock
        self._describe = describe
        self._recordings: dict[int, _Recording] = {}
        self._timed: list[tuple[Any, ...]] = []  # the fields of timed commands: plain tuples cost least
        self._count = 0  # ops and other commands in `_timed`
        self._most = 0  # the largest limit of all recordings
        self._start = 0  # start of the running command
        self._swaps: list[tuple[int, Swapped]] = []
        self._steps: list[StepTimes] = []
        self._next_sample = 0

    def take(self, session: int, limit: int) -> tuple[tuple[Ran, ...], int, tuple[tuple[int, int], ...]]:
        """The oldest commands recorded, how many were dropped since the last call, and samples of the memory. From now
        on at most `limit` commands are held; 0 ends the recording."""
        self.settle()
        recording = self._recordings.setdefault(session, _Recording())
        taken = tuple(recording.ran.popleft() for _ in range(min(RAN_AT_ONCE, len(recording.ran))))
        dropped, recording.dropped = recording.dropped, 0
        memory, recording.memory = tuple(recording.memory), []
        if limit and not recording.limit:
            self._next_sample = 0  # however short the recording is, it has a sample
        recording.limit = limit
        if not limit and not recording.ran:
            self.forget(session)
        self._update()
        return taken, dropped, memory

    def forget(self, session: int) -> None:
        self.settle()
        self._recordings.pop(session, None)
        self._update()

    def _update(self) -> None:
        self._most = max((recording.limit for recording in self._recordings.values()), default=0)
        self.is_on = bool(self._most) or self._listener is not None

    def listen(self, listener: Callable[[TimedCommand], None]) -> None:
        """Call `listener` with each command from now on."""
        self._listener = listener
        self._update()

    # Recording

    def timed(self, commands: Iterable[Command]) -> Iterator[Command]:
        """The same commands. The time until the next one is asked for is that of the command."""
        clock = self.clock
        start = self.begin()
        for command in commands:
            self._start = start
            yield command
            end = clock()
            self._add(command, start, end)
            start = end if self._listener is None else clock()  # the time of a listener is not that of a command

    def begin(self) -> int:
        """The time at which a command begins; `end` records one that does not run in a batch."""
        self._keep_alone()
        self._start = self.clock()
        return self._start

    def end(self, command: Command, start: int) -> None:
        self._add(command, start, self.clock())

    def _add(self, command: Command | None, start: int, end: int) -> None:
        swaps, steps = self._swaps, self._steps
        if swaps:
            self._swaps = []
        if steps:
            self._steps = []
        fields = (command, start, end, swaps or (), steps or ())
        if self._listener is not None and command is not None:
            self._listener(TimedCommand(*fields))
        if self._count >= self._most:
            self.settle()  # what the recordings have no room for is counted
        self._timed.append(fields)
        self._count += 1 + sum([len(times) - 1 for _, times in steps])

    def _keep_alone(self) -> None:
        """Record the exchanges that have ended between commands."""
        if self._swaps:
            self._add(None, self._start, self._start)

    def timed_steps(self, steps: Sequence[_Step]) -> Iterator[_Step]:
        """The same steps of a program, each with the position of its op as the last field."""
        clock = self.clock
        times = [clock()]
        self._steps.append((steps, times))
        for step in steps:
            yield step
            times.append(clock())

    def note_code(self, positions: range, start: int) -> None:
        """Record compiled code that has run in place of ops of a program, unless the ops themselves have run."""
        if positions and (not self._steps or self._steps[-1][1][0] < start):
            self._steps.append((positions, [start, self.clock()]))

    def note_exchange(self, command: RunOp, steps: Sequence[LocalStep], start: int, *, is_payload: bool = True) -> None:
        """Record an exchange of a command that has ended. If an earlier command began it, the one that is running has
        waited for it since its own start. Only a payload has bytes."""
        sends: Counter[int] = Counter()
        receives: Counter[int] = Counter()
        for step in steps if is_payload else ():
            sends.update(step.sent)
            receives.update(step.received)
        kind = ", ".join(dict.fromkeys(step.kind for step in steps))
        target = command.outputs[0] if command.outputs else 0
        bytes_by_peer = tuple(sends.items()), tuple(receives.items())
        swap = Swapped(max(start, self._start), self.clock(), *bytes_by_peer, kind, command.site, target)
        self._swaps.append((owner_of(command), swap))

    def sample_memory(self, measure: Callable[[], int]) -> None:
        """Record the bytes that the worker holds, unless that was done a moment ago."""
        now = self.clock()
        if now < self._next_sample:
            return
        self._next_sample = now + SAMPLE_NANOSECONDS
        sample = (now, measure())
        for recording in self._recordings.values():
            if recording.limit and len(recording.memory) < MAX_SAMPLES:
                recording.memory.append(sample)

    # Describing

    def settle(self) -> None:
        """Describe what was recorded: before definitions are forgotten, and before it is taken."""
        timed, self._timed, self._count = self._timed, [], 0
        for fields in timed:
            each = TimedCommand(*fields)
            command = each.command
            session = owner_of(command) if command is not None else 0
            name = TIMELINE_NAMES[type(command)] if command is not None else None
            own = [swap for owner, swap in each.swaps if owner == session and name is not None]
            if len(own) < len(each.swaps):
                for owner, swap in each.swaps:
                    if owner != session or name is None:
                        self._tell(owner, [_exchange_alone(owner, swap)], 1)
            if command is not None and name is not None:
                count = sum(len(times) - 1 for _, times in each.steps)
                self._tell(session, self._described(command, each, session, name, own), max(1, count))

    def _tell(self, session: int, described: Iterable[Ran], count: int) -> None:
        """Add records of a session to the recordings that ask for it. If none of these has room, what there is to
        describe, about `count` records, is counted only."""
        recordings = [self._recordings.get(owner) for owner in {session, ALL_SESSIONS}]
        listening = [recording for recording in recordings if recording is not None and recording.limit]
        if all(recording.is_full for recording in listening):
            for recording in listening:
                recording.dropped += count
            return
        for ran in described:
            for recording in listening:
                recording.add(ran)

    def _described(
        self, command: Command, timed: TimedCommand, session: int, name: str, swaps: Sequence[Swapped]
    ) -> Iterator[Ran]:
        start, end = timed.start, timed.end
        if isinstance(command, RunProgram):
            yield from self._described_program(command, session, timed, swaps)
            return
        ids = _named_ids(command)
        if isinstance(command, RunOp | QueryOp):
            op = self._describe.describe_op(command.op_id)
            scope = self._describe.describe_scope(session, command.scope)
            yield Ran(
                op.name, command.site, scope, start, end, tuple(swaps), session, *ids, op.ops, op.layouts, op.moves
            )
        else:
            site = command.site if isinstance(command, WorkerCreateTensor | WorkerFetchTensor) else 0
            yield Ran(name, site, "", start, end, tuple(swaps), session, *ids)

    def _described_program(
        self, command: RunProgram, session: int, timed: TimedCommand, swaps: Sequence[Swapped]
    ) -> Iterator[Ran]:
        """The ops of a program that have run; the swaps belong to the ops in whose time they were, or to none: the
        program has waited for them before its first op."""
        program, described = self._describe.describe_program(command.program_id)
        ids, ops = program.values(command), program.ops
        first = timed.steps[0][1][0] if timed.steps else timed.end
        for swap in swaps:
            if swap.start < first:
                yield _exchange_alone(session, swap)
        for positions, start, end in timed.op_times:
            op, last, count = ops[positions[0]], ops[positions[-1]], len(positions)
            one = described[positions[0]] if count == 1 else OpDescription(f"compiled code of {count} ops", count)
            within = tuple(swap for swap in swaps if start <= swap.start < end)
            inputs = tuple([ids[slot] for slot in op.inputs[:MAX_NAMED]])
            outputs = tuple([ids[slot] for slot in last.outputs[:MAX_NAMED]])
            scope = self._describe.describe_scope(session, op.scope)
            yield Ran(
                one.name, op.site, scope, start, end, within, session, inputs, outputs, one.ops, one.layouts, one.moves
            )


def _exchange_alone(session: int, swap: Swapped) -> Ran:
    """An exchange that no recorded command of its session has waited for."""
    return Ran("exchange", swap.site, "", swap.start, swap.end, (swap,), session, (), (swap.target,))


def _named_ids(command: Command) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first of the tensors that a command reads, and of those that it makes."""
    if isinstance(command, RunOp):
        return command.inputs[:MAX_NAMED], command.outputs[:MAX_NAMED]
    if isinstance(command, WorkerCreateTensor):
        return (), (command.id,)
    if isinstance(command, QueryOp):
        return command.inputs[:MAX_NAMED], (command.first,)
    ids = [ident for ident in id_fields(type(command)).tensors(command) if session_of(ident)]
    return tuple(ids[:MAX_NAMED]), ()
