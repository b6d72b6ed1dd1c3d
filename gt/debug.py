"""Tools to look inside a session: recent instructions, communication, memory, worker statistics and timelines."""

from __future__ import annotations

import builtins
import logging
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from msgspec.structs import astuple
from rich.console import Console

from gt.client import active_session
from gt.client.session import Session
from gt.client.tensor import Tensor
from gt.core.errors import SessionError
from gt.core.ids import short_id
from gt.core.messages import (
    MAX_RECORDED,
    Collective,
    CreateTensor,
    FetchTensor,
    FreeTensors,
    Instruction,
    MemoryUse,
    QueryOp,
    Ran,
    RunOp,
    RunSegment,
    TrafficRead,
    WorkerMemory,
    WorkerStats,
)
from gt.core.timeline import TimelineEvent, Transfer
from gt.monitor.records import records_of
from gt.monitor.sharding_picture import HeldPart, ShardingPicture
from gt.monitor.trace_files import describe_gaps, write_trace
from gt.sharding.spec import ShardingSpec, local_box

log = logging.getLogger("gt.debug")
WORKER_SECONDS = 60.0  # that the end of a trace waits for busy workers


class CollectiveEvent(NamedTuple):
    """One collective: its kind, the mesh axes it ran along, the payload bytes that all workers together received, the
    op and line that issued it, the number of tensors that were exchanged together, and the way it went: "shared
    memory", "gloo all-reduce", "gloo point-to-point", ..."""

    kind: str
    axis: str
    bytes: int
    op: str
    line: str
    tensors: int
    way: str


class Comm:
    """Communication between workers inside `with gt.debug.comm() as c:`. `bytes` is counted by the workers, `pairs` the
    same by (sender, receiver); `events` are the collectives that the dispatcher planned."""

    def __init__(self) -> None:
        self.bytes = 0
        self.pairs: dict[tuple[int, int], int] = {}
        self.events: list[CollectiveEvent] = []

    def __enter__(self) -> Comm:
        self._session = active_session.current()
        self._before = _by_pair(self._session.read_traffic(watch=True))
        return self

    def __exit__(self, *error: object) -> None:
        answer = self._session.read_traffic(watch=False)
        after = _by_pair(answer)
        self.pairs = {pair: count - self._before.get(pair, 0) for pair, count in after.items()}
        self.pairs = {pair: count for pair, count in self.pairs.items() if count}
        self.bytes = sum(self.pairs.values())
        ways = _Ways(answer)
        self.events = [
            CollectiveEvent(
                c.kind,
                " ".join(c.axes),
                c.nbytes,
                c.op,
                _site(self._session, c.site),
                c.tensors,
                ways.of(c),
            )
            for c in answer.collectives
        ]

    def count(self, kind: str) -> int:
        """The number of collectives of a kind."""
        return sum(event.kind == kind for event in self.events)


class _Ways:
    """The ways of collectives. Workers report them for single tensors; a bucket has the ways of its tensors."""

    def __init__(self, answer: TrafficRead) -> None:
        self._exact: dict[tuple[object, ...], dict[str, None]] = {}
        self._similar: dict[tuple[object, ...], dict[str, None]] = {}
        for kind, axes, nbytes, way in map(astuple, answer.ways):
            self._exact.setdefault((kind, axes, nbytes), {})[way] = None
            self._similar.setdefault((kind, axes), {})[way] = None

    def of(self, collective: Collective) -> str:
        kind, axes = collective.kind, collective.axes
        exact = self._exact.get((kind, axes, collective.nbytes))
        return ", ".join(exact if exact is not None else self._similar.get((kind, axes), {}))


def comm() -> Comm:
    """Record the collectives that run inside: `with gt.debug.comm() as c: ...; print(c.bytes, c.events)`."""
    return Comm()


def _by_pair(answer: TrafficRead) -> dict[tuple[int, int], int]:
    return {(sender, worker): count for worker, by in answer.received.items() for sender, count in by.items()}


class HotPaths(NamedTuple):
    """Repeated runs of ops, which are sent as one message and replayed by the workers: `segments` were found; they were
    sent `hits` times, with `ops` ops in all, while `misses` ops were sent one by one. `deviations` counts, by reason
    and line, how often the program did not go on as it had before."""

    segments: int
    hits: int
    ops: int
    misses: int
    deviations: dict[tuple[str, str], int]


class StatsOfWorkers(dict[int, WorkerStats]):
    """The counters of each worker by its number. `hot_paths` are those of this program."""

    hot_paths: HotPaths


def get_worker_stats() -> StatsOfWorkers:
    """The counters of each worker since its start, and its memory now, after all ops issued so far:
    `gt.debug.get_worker_stats()[0].bytes`; and the repeated runs of ops that this program has sent as one message:
    `gt.debug.get_worker_stats().hot_paths.hits`."""
    session = active_session.current()
    stats = StatsOfWorkers(session.read_stats().stats)
    found = session.matcher.stats()
    deviations = {(reason, _site(session, site)): count for (reason, site), count in found.deviations.items()}
    stats.hot_paths = HotPaths(*found[:4], deviations)
    return stats


class MemoryBytes(NamedTuple):
    """Bytes of tensors in their own layouts, and of copies in other layouts."""

    originals: int
    copies: int

    @property
    def total(self) -> int:
        return self.originals + self.copies


class LineMemory(NamedTuple):
    """The bytes that a line of the program takes: of the tensors that it made, and of the copies that it needed. `line`
    is "before" for all that was there before the block."""

    line: str
    live: MemoryBytes
    peak: MemoryBytes


class MemoryOfWorker(NamedTuple):
    """The bytes at the end of the block, and when they were most. `most_copies` are the most bytes of copies at any
    time. `lines` have the same bytes by line, the line with most bytes at the peak first."""

    live: MemoryBytes
    peak: MemoryBytes
    most_copies: int
    lines: tuple[LineMemory, ...]


class Memory:
    """The memory that the tensors of this program take on each worker inside `with gt.debug.memory() as m:`. Tensors
    that share memory are counted once. Memory that an op takes while it runs is not counted."""

    def __init__(self) -> None:
        self.workers: dict[int, MemoryOfWorker] = {}

    def __enter__(self) -> Memory:
        session = self._session = active_session.current()
        if session.is_measuring:
            raise SessionError("memory is being measured already; leave its block before entering another one")
        session.read_memory(watch=True)
        session.is_measuring = True
        return self

    def __exit__(self, *error: object) -> None:
        self._session.is_measuring = False
        answer = self._session.read_memory(watch=False)
        self.workers = {worker: _memory(self._session, memory) for worker, memory in answer.workers}

    @property
    def peak(self) -> int:
        """The most bytes that any worker held."""
        return max((memory.peak.total for memory in self.workers.values()), default=0)


def memory() -> Memory:
    """Record the memory of tensors inside: `with gt.debug.memory() as m: ...; print(m.workers[0].peak.total)`."""
    return Memory()


def _memory(session: Session, memory: WorkerMemory) -> MemoryOfWorker:
    by_line: dict[str, list[MemoryUse]] = {}
    for use in memory.uses:
        by_line.setdefault(_site(session, use.site) if use.site else "before", []).append(use)
    lines = [LineMemory(line, *_bytes(uses)) for line, uses in by_line.items()]
    lines.sort(key=lambda line: -line.peak.total)
    return MemoryOfWorker(*_bytes(memory.uses), memory.most_copies, tuple(lines))


def _bytes(uses: Iterable[MemoryUse]) -> tuple[MemoryBytes, MemoryBytes]:
    """The bytes now, and at the peak."""
    originals, copies = [use for use in uses if not use.is_copy], [use for use in uses if use.is_copy]
    live = MemoryBytes(sum(use.live for use in originals), sum(use.live for use in copies))
    return live, MemoryBytes(sum(use.peak for use in originals), sum(use.peak for use in copies))


class Timeline:
    """The commands that each worker ran inside `with gt.debug.timeline() as t:`. All times are nanoseconds of the
    machine's monotonic clock. Each worker records at most `limit` commands; `dropped` counts the others."""

    def __init__(self, limit: int) -> None:
        self.events: list[TimelineEvent] = []
        self.dropped = 0
        self._limit = limit

    def __enter__(self) -> Timeline:
        session = self._session = active_session.current()
        if session.is_recording:
            raise SessionError("a timeline is being recorded already; leave its block before entering another one")
        while self._read(0):
            pass  # commands of an earlier block whose end could not be read
        self.events, self.dropped, session.is_recording = [], 0, True
        session.read_timeline(self._limit)
        return self

    def __exit__(self, *error: object) -> None:
        self._session.is_recording = False
        while self._read(0):
            pass
        self.events.sort(key=lambda event: (event.start, event.worker))

    def _read(self, limit: int) -> bool:
        """Take some recorded commands; returns whether there were any."""
        found = False
        for timeline in self._session.read_timeline(limit).workers:
            self.events += [_event(self._session, timeline.worker, ran) for ran in timeline.ran]
            self.dropped += timeline.dropped
            found = found or bool(timeline.ran)
        return found

    @property
    def workers(self) -> list[int]:
        """The workers that ran a command."""
        return sorted({event.worker for event in self.events})

    @property
    def span(self) -> int:
        """From the start of the first command on any worker to the end of the last."""
        if not self.events:
            return 0
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    def busy(self, worker: int) -> int:
        """Nanoseconds that a worker spent in commands, without exchanges with others."""
        return sum(event.busy for event in self.events if event.worker == worker)

    def idle(self, worker: int) -> int:
        """The rest of the span: no command, or waiting for another worker."""
        return self.span - self.busy(worker)


def timeline(limit: int = 1 << 16) -> Timeline:
    """Record the commands of the workers inside: `with gt.debug.timeline() as t: ...; print(t.idle(0) / t.span)`."""
    if not 0 < limit <= MAX_RECORDED:
        raise ValueError(f"a timeline of {limit} commands of each worker is not possible: 1 to {MAX_RECORDED} are")
    return Timeline(limit)


def _event(session: Session, worker: int, ran: Ran) -> TimelineEvent:
    line = _site(session, ran.site) if ran.site else ""
    transfers = tuple(Transfer(swap.start, swap.end, swap.sends, swap.receives) for swap in ran.swaps)
    return TimelineEvent(worker, ran.op, line, ran.scope, ran.start, ran.end, transfers)


class Trace:
    """Writes what happens inside `with gt.debug.trace("run.json"):` to a file that Perfetto opens. `dropped` counts the
    events that there was no room for, and `missing` are workers that did not send their commands in time."""

    def __init__(self, path: str | Path, limit: int) -> None:
        self.path = Path(path)
        self.dropped = 0
        self.missing: tuple[int, ...] = ()
        self._limit = limit

    def __enter__(self) -> Trace:
        self.begin(active_session.current())
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self, session: Session) -> None:
        assert session.captures is not None, "the launcher sets it"
        self._captures, self._session = session.captures, session
        session.outbox.flush()  # ops from before are not part of the trace
        self._captures.begin(self._limit)

    def end(self) -> None:
        """Stop, and write the file."""
        if not self._session.closed_because:
            self._session.outbox.flush()
        captured = self._captures.end(WORKER_SECONDS)
        self.dropped, self.missing = captured.dropped, captured.missing
        write_trace(self.path, records_of(captured.events), captured.dropped)
        if gaps := describe_gaps(self.dropped, self.missing):
            log.warning("the trace %s is not complete: %s", self.path, gaps)


def trace(path: str | Path, limit: int = 1 << 20) -> Trace:
    """Write a trace of what clients, dispatcher and workers do inside: `with gt.debug.trace("run.json"): ...`. Open it
    at https://ui.perfetto.dev; a file named `run.log` is a log. At most `limit` messages are kept, and as many commands
    of each worker."""
    if limit < 1:
        raise ValueError(f"a trace of {limit} events is not possible")
    return Trace(path, limit)


def visualize_sharding(tensor: Tensor) -> ShardingPicture:
    """Show where the parts of a tensor lie: a coloured table in a terminal, HTML in a notebook. Replicas have one
    colour. Returns the picture: `gt.visualize_sharding(x).save("x.svg")`, or `.png`."""
    picture = sharding_picture(tuple(tensor.shape), tensor.itemsize, tensor.spec)
    if not _is_in_notebook():
        Console().print(picture)
    return picture


def sharding_picture(shape: tuple[int, ...], itemsize: int, spec: ShardingSpec) -> ShardingPicture:
    """The picture of a layout."""
    mesh = spec.mesh
    kind = "" if spec.kind == "sum" else f" ({spec.kind})"
    partial = " ".join(spec.partial) + kind if spec.partial else ""
    numbers: dict[object, int] = {}
    parts = []
    for worker in mesh.workers:
        box = local_box(spec, shape, worker)
        along = tuple(mesh.coordinate(worker)[mesh.axis_names.index(axis)] for axis in spec.partial)
        number = numbers.setdefault((box, along), len(numbers))
        coordinate = " ".join(f"{axis}={at}" for axis, at in zip(mesh.axis_names, mesh.coordinate(worker), strict=True))
        nbytes = itemsize * math.prod(stop - start for start, stop in box)
        parts.append(HeldPart(worker, coordinate or "-", number, box, nbytes, partial))
    text = f"{'x'.join(map(str, shape)) or 'scalar'} as [{spec}] on mesh {mesh}"
    return ShardingPicture(text, shape, parts)


def _is_in_notebook() -> bool:
    shell = getattr(builtins, "get_ipython", None)
    return shell is not None and type(shell()).__name__ == "ZMQInteractiveShell"


def tape(count: int = 50) -> list[str]:
    """The most recent instructions, oldest first, one line each."""
    session = active_session.current()
    session.outbox.flush()
    lines = [_line(session, each) for instruction in session.outbox.tape for each in _expanded(session, instruction)]
    return [line for line in lines if line][-count:]


def print_tape(count: int = 50, file: TextIO | None = None) -> None:
    """Print the most recent instructions: `%3 = aten.mm.default(%1, %2)  train.py:12`."""
    print("\n".join(tape(count)), file=file or sys.stdout)


def _expanded(session: Session, instruction: Instruction) -> Sequence[Instruction]:
    """The instructions that an instruction stands for: those of the ops, if `gt.compile` has sent a segment."""
    body = session.segment_bodies.get(instruction.segment_id) if isinstance(instruction, RunSegment) else None
    return body.expand(instruction) if body is not None else (instruction,)  # type: ignore[arg-type]


def _line(session: Session, instruction: Instruction) -> str:
    if isinstance(instruction, RunOp | QueryOp):
        signature = session.signatures.get(instruction.op_id)
        op = signature.op if signature is not None else "(forgotten op)"
        outputs = instruction.outputs if isinstance(instruction, RunOp) else (*instruction.written, instruction.first)
        arguments = [*map(_name, instruction.inputs), *map(repr, instruction.scalars)]
        call = f"{', '.join(map(_name, outputs))} = {op}({', '.join(arguments)})"
        return f"{call:<72}  {_site(session, instruction.site)}"
    if isinstance(instruction, CreateTensor):
        return (
            f"{_name(instruction.id)} = upload {instruction.meta}".ljust(72) + f"  {_site(session, instruction.site)}"
        )
    if isinstance(instruction, FreeTensors):
        return f"free {', '.join(map(_name, instruction.ids))}"
    if isinstance(instruction, FetchTensor):
        return f"fetch {_name(instruction.id)}"
    return ""


def _name(ident: int) -> str:
    return f"%{short_id(ident)}"


def _site(session: Session, site: int) -> str:
    file, line, _ = session.sites.lookup(site)
    return f"{file}:{line}"
