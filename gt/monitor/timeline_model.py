"""What a timeline shows, read from the rows of a log: work, exchanges and waits of workers, and reads of clients.

The log of a trace has the times at which workers ran their commands. An instruction log has only the times at which
commands were sent: a timeline of it `has_send_times` only, and its work takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gt.core.errors import SettingsError
from gt.monitor.log_rows import LogRow, read_rows
from gt.monitor.trace_log import COMMAND, DONE, EXCHANGE, RUN
from gt.sharding.op_kinds import MOVEMENT, op_kind

TRANSFER = "transfer"
_KIND_OF_COMMAND = {"upload": TRANSFER, "fetch": TRANSFER, "redistribute": MOVEMENT}
_BOOKKEEPING = frozenset({"free", "define", "forget", "synchronize"})  # commands that compute nothing
_SENT_OPS = frozenset({"WorkerRunOp", "WorkerQueryOp"})
_QUESTIONS = frozenset({"FetchTensor", "Synchronize", "QueryOp"})


class Work(NamedTuple):
    """A worker computes, or moves bytes on its own. Times are seconds."""

    worker: int
    start: float
    end: float
    op: str
    kind: str
    site: str
    scope: str


class Exchanged(NamedTuple):
    """A worker's part of an exchange: it comes at `start`, goes on at `met`, when those that it receives from have come
    too, and is done at `end`. `receives` are bytes by sender."""

    worker: int
    start: float
    met: float
    end: float
    kind: str
    site: str
    receives: tuple[tuple[int, int], ...]
    late: int | None

    @property
    def nbytes(self) -> int:
        return sum([nbytes for _, nbytes in self.receives])


class Read(NamedTuple):
    """A client waits for an answer."""

    client: str
    start: float
    end: float
    command: str
    site: str


class ScopeBand(NamedTuple):
    worker: int
    start: float
    end: float
    scope: str


class Timeline(NamedTuple):
    """A log as work, exchanges and reads. `exchanges` has a list of the workers' parts for each exchange."""

    start: float
    end: float
    workers: tuple[int, ...]
    work: list[Work]
    exchanges: list[list[Exchanged]]
    reads: list[Read]
    has_send_times: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


def read_timeline(path: Path) -> Timeline:
    """Raises SettingsError if the file is no log, or names no work of workers."""
    rows = read_rows(path)
    try:
        timeline = timeline_of(rows)
    except _WrongRow as wrong:
        raise SettingsError(f"{path}: row {wrong.seq}: {wrong.reason}") from None
    if not timeline.workers:
        raise SettingsError(
            f"{path}: no worker runs an op in this log of {len(rows)} rows; capture a program while it computes"
        )
    return timeline


def timeline_of(rows: Sequence[LogRow]) -> Timeline:
    ran = [row for row in rows if row.direction in (RUN, DONE)]
    work = list(_work(ran)) if ran else list(_sent_work(rows))
    exchanges = _exchanges(ran) if ran else _sent_exchanges(rows)
    active: list[Work | Exchanged] = [*work, *[part for exchange in exchanges for part in exchange]]
    start = min([each.start for each in active], default=0.0)
    end = max([each.end for each in active], default=start)
    workers = tuple(sorted({each.worker for each in active}))
    reads = [read for read in _reads(rows) if read.end > start and read.start < end]
    return Timeline(start, end, workers, work, exchanges, reads, not ran)


class _WrongRow(Exception):
    def __init__(self, row: LogRow, reason: str) -> None:
        self.seq = row.seq
        self.reason = reason


# The log of a trace


def _pairs(rows: Iterable[LogRow], command: str) -> Iterator[tuple[LogRow, LogRow]]:
    """The rows of starts and ends that belong together. One without the other was not captured, and is left out."""
    begun: dict[tuple[str, str, str], LogRow] = {}
    for row in rows:
        if row.command != command:
            continue
        key = (row.peer, row.details.get("run", ""), row.details.get("exchange", ""))
        if row.direction == RUN:
            begun[key] = row
        elif key in begun:
            yield begun.pop(key), row


def _work(rows: Sequence[LogRow]) -> Iterator[Work]:
    """The commands of workers, without the exchanges in the middle of them."""
    inside: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for start, end in _pairs(rows, EXCHANGE):
        inside.setdefault((start.peer, start.details.get("run", "")), []).append((start.elapsed, end.elapsed))
    for start, end in _pairs(rows, COMMAND):
        if start.op in _BOOKKEEPING:
            continue
        begin = start.elapsed
        gaps = sorted(inside.get((start.peer, start.details.get("run", "")), ()))
        for left, right in [*gaps, (end.elapsed, end.elapsed)]:
            if left > begin or not gaps:
                yield _piece(start, begin, left)
            begin = max(begin, right)


def _piece(row: LogRow, start: float, end: float) -> Work:
    kind = _KIND_OF_COMMAND.get(row.op) or op_kind(row.op)
    return Work(_worker(row), start, end, row.op, kind, row.site, row.details.get("scope", ""))


def _exchanges(rows: Sequence[LogRow]) -> list[list[Exchanged]]:
    groups: dict[str, list[tuple[LogRow, LogRow]]] = {}
    for start, end in _pairs(rows, EXCHANGE):
        groups.setdefault(start.details.get("exchange", ""), []).append((start, end))
    return [_meet(pairs) for pairs in groups.values()]


def _meet(pairs: list[tuple[LogRow, LogRow]]) -> list[Exchanged]:
    came = {_worker(start): start.elapsed for start, _ in pairs}
    parts = []
    for start, end in pairs:
        receives = _receives(start)
        met, late = max([(came[peer], peer) for peer, _ in receives if peer in came], default=(0.0, -1))
        is_late = met > start.elapsed
        parts.append(
            Exchanged(
                _worker(start),
                start.elapsed,
                min(met, end.elapsed) if is_late else start.elapsed,
                end.elapsed,
                start.op,
                start.site,
                receives,
                late if is_late else None,
            )
        )
    return parts


def _receives(row: LogRow) -> tuple[tuple[int, int], ...]:
    text = row.details.get("peers", "")
    try:
        pairs = [pair.split(":") for pair in text.split(",") if pair]
        return tuple([(int(peer), int(nbytes)) for peer, nbytes in pairs])
    except ValueError:
        raise _WrongRow(row, f"peers={text} are not workers and bytes such as 1:48,2:48") from None


def _worker(row: LogRow) -> int:
    role, _, number = row.peer.partition(" ")
    if role != "worker" or not number.isdecimal():
        raise _WrongRow(row, f"{row.peer!r} is no worker such as 'worker 0'")
    return int(number)


# An instruction log


def _sent_work(rows: Sequence[LogRow]) -> Iterator[Work]:
    for row in rows:
        if row.direction == "WORKER_SEND" and row.command in _SENT_OPS and row.op not in _KIND_OF_COMMAND:
            yield _piece(row, row.elapsed, row.elapsed)


def _sent_exchanges(rows: Sequence[LogRow]) -> list[list[Exchanged]]:
    """Moves that were sent to several workers, one after another: senders and receivers are not known."""
    exchanges: dict[tuple[str, str], list[Exchanged]] = {}
    for row in rows:
        if row.direction == "WORKER_SEND" and row.command in _SENT_OPS and row.op in _KIND_OF_COMMAND:
            part = Exchanged(_worker(row), row.elapsed, row.elapsed, row.elapsed, row.op, row.site, (), None)
            exchanges.setdefault((row.ids, row.site), []).append(part)
    return list(exchanges.values())


# Clients and scopes


def _reads(rows: Iterable[LogRow]) -> Iterator[Read]:
    """From a request of a client to its answer."""
    asked: dict[tuple[str, str], LogRow] = {}
    for row in rows:
        key = (row.peer, row.details.get("request", ""))
        if row.direction == "RECV" and row.command in _QUESTIONS and key[1]:
            asked[key] = row
        elif row.direction == "SEND" and key in asked:
            request = asked.pop(key)
            yield Read(row.peer, request.elapsed, row.elapsed, request.command, request.site)


def scope_bands(work: Iterable[Work]) -> list[ScopeBand]:
    """The ops of one scope that follow each other on a worker. Moves and transfers between them are not counted: they
    have no scope."""
    bands: list[ScopeBand] = []
    last: dict[int, ScopeBand] = {}
    for each in sorted(work, key=lambda each: each.start):
        if each.op in _KIND_OF_COMMAND:
            continue
        band = last.get(each.worker)
        if band is not None and band.scope == each.scope:
            last[each.worker] = band._replace(end=each.end)
            continue
        if band is not None:
            bands.append(band)
        last[each.worker] = ScopeBand(each.worker, each.start, each.end, each.scope)
    return [band for band in (*bands, *last.values()) if band.scope]
