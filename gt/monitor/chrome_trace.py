"""Records as a trace in Chrome's format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Each client, the dispatcher and each worker is a process of the trace. A worker has threads for its compute, its
collectives, its waits for other workers and its uploads and reads, and one with its scopes as bands. Arrows go from the
line of a client to the op on a worker, and from the worker that sends to the worker that receives.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from gt.core.errors import SettingsError
from gt.core.ids import short_id
from gt.core.message_events import BatchPlanned, OpIssued, WorkerRan, WorkerSampled
from gt.core.messages import Ran
from gt.core.output_files import make_parents, open_binary, open_text
from gt.monitor.activity import MessageSeen, Record
from gt.monitor.log_rows import FORMATS
from gt.monitor.trace_log import MetExchange, met_exchanges, trace_rows

Entry: TypeAlias = dict[str, Any]
"""One entry of a trace, as the format has it."""

DISPATCHER, FIRST_CLIENT, FIRST_WORKER = 1, 100, 10_000  # process numbers in the trace
COMPUTE, COLLECTIVES, WAITS, TRANSFERS, SCOPES = range(1, 6)  # threads of a worker
OPS, CLIENT_WAITS = 1, 2  # threads of a client
PLANNING = 2  # thread of the dispatcher; viewers call the thread with the number of its process the main thread
_WORKER_THREADS = {
    COMPUTE: "compute",
    COLLECTIVES: "collectives",
    WAITS: "waits for workers",
    TRANSFERS: "uploads and reads",
    SCOPES: "scopes",
}
_CLIENT_THREADS = {OPS: "ops issued", CLIENT_WAITS: "waits"}
_TRANSFERS = frozenset({"upload", "fetch"})
_ANSWERED = frozenset({"FetchTensor", "Synchronize", "QueryOp", "ReadVersions", "LocateTensor"})


def chrome_trace(records: Iterable[Record], dropped: int = 0) -> Entry:
    """The whole trace. `dropped` is the number of records that there was no room for."""
    writer = _TraceWriter(list(records))
    return {
        "traceEvents": writer.entries(),
        "displayTimeUnit": "ms",
        "otherData": {"producer": "gt", "records that were dropped": str(dropped)},
    }


class _TraceWriter:
    def __init__(self, records: Sequence[Record]) -> None:
        self._seen = [record for record in records if isinstance(record, MessageSeen)]
        self._planned = [record for record in records if isinstance(record, BatchPlanned)]
        self._ran = [record for record in records if isinstance(record, WorkerRan)]
        self._samples = [record for record in records if isinstance(record, WorkerSampled)]
        self._issued = [record for record in records if isinstance(record, OpIssued)]
        starts = [
            *[record.time for record in self._seen],
            *[record.start for record in self._planned],
            *[record.ran.start for record in self._ran],
            *[record.time for record in self._issued],
        ]
        self._zero = min(starts, default=0)
        self._arrows = count(1)  # viewers join the ends of an arrow by a number

    def entries(self) -> list[Entry]:
        return [
            *self._names(),
            *self._client_ops(),
            *self._client_waits(),
            *self._dispatcher(),
            *self._worker_ops(),
            *self._exchanges(),
            *self._scopes(),
            *self._flows_to_workers(),
            *self._memory(),
            *self._queues(),
        ]

    # The processes of the trace

    def _names(self) -> Iterator[Entry]:
        clients = {issued.session for issued in self._issued} | {planned.session for planned in self._planned}
        workers = {*[record.worker for record in self._ran], *[sample.worker for sample in self._samples]}
        yield from _process(DISPATCHER, "dispatcher", 1, {PLANNING: "planning"})
        for session in sorted(clients):
            yield from _process(FIRST_CLIENT + session, f"client {session}", 0, _CLIENT_THREADS)
        for worker in sorted(workers):
            yield from _process(FIRST_WORKER + worker, f"worker {worker}", 2 + worker, _WORKER_THREADS)

    # Clients and the dispatcher

    def _client_ops(self) -> Iterator[Entry]:
        """Each op lasts until the client issues the next one, at most a microsecond: what else it does is not known."""
        for session, issued in _grouped(self._issued, lambda record: record.session).items():
            ends = [*[record.time for record in issued[1:]], issued[-1].time + 1000]
            for record, end in zip(issued, ends, strict=True):
                arguments = {"line": record.site, "tensor": f"%{short_id(record.output)}"}
                end = min(end, record.time + 1000)
                yield self._slice(FIRST_CLIENT + session, OPS, record.op, record.time, end, arguments)

    def _client_waits(self) -> Iterator[Entry]:
        """From a request to its answer."""
        asked: dict[int, MessageSeen] = {}
        for seen in self._seen:
            if seen.direction == "RECV" and seen.command in _ANSWERED and seen.request:
                asked[seen.request] = seen
            elif seen.direction == "SEND" and seen.request in asked:
                request = asked.pop(seen.request)
                process = FIRST_CLIENT + int(seen.peer.rpartition(" ")[2])
                arguments = {"line": request.site, "request": request.command}
                yield self._slice(process, CLIENT_WAITS, f"wait: {request.command}", request.time, seen.time, arguments)

    def _dispatcher(self) -> Iterator[Entry]:
        for planned in self._planned:
            name = f"plan {planned.instructions} instructions"
            arguments = {"client": planned.session}
            yield self._slice(DISPATCHER, PLANNING, name, planned.start, planned.end, arguments)

    # Workers

    def _worker_ops(self) -> Iterator[Entry]:
        for record in self._ran:
            ran = record.ran
            arguments = {
                "line": record.site,
                "scope": ran.scope,
                "inputs": " ".join(f"%{short_id(ident)}" for ident in ran.inputs),
                "outputs": " ".join(f"%{short_id(ident)}" for ident in ran.outputs),
            }
            for start, end in _pieces(ran):
                yield self._slice(FIRST_WORKER + record.worker, _thread(ran), ran.op, start, end, arguments)

    def _exchanges(self) -> Iterator[Entry]:
        """Collectives, the waits for other workers in them, and arrows from senders to receivers."""
        for group in met_exchanges(self._ran):
            begun = {exchange.ran.worker: exchange for exchange in group}
            for exchange in group:
                yield from self._exchange(exchange)
                for peer, _ in exchange.swap.receives:
                    if peer in begun:
                        target = max(exchange.met, exchange.swap.end - 1)
                        yield from self._arrow(
                            "exchange",
                            (FIRST_WORKER + peer, COLLECTIVES, begun[peer].met),
                            (FIRST_WORKER + exchange.ran.worker, COLLECTIVES, target),
                        )

    def _exchange(self, exchange: MetExchange) -> Iterator[Entry]:
        process, swap, site = FIRST_WORKER + exchange.ran.worker, exchange.swap, exchange.ran.site
        arguments = {
            "line": site,
            "op": exchange.ran.ran.op,
            "bytes sent": sum(nbytes for _, nbytes in swap.sends),
            "bytes received": sum(nbytes for _, nbytes in swap.receives),
        }
        if exchange.late is not None:
            name = f"wait for worker {exchange.late}"
            yield self._slice(process, WAITS, name, swap.start, exchange.met, {"line": site})
        yield self._slice(process, COLLECTIVES, swap.kind or "exchange", exchange.met, swap.end, arguments)

    def _scopes(self) -> Iterator[Entry]:
        """Bands: ops of one scope that follow each other on a worker."""
        for worker, records in _grouped(self._ran, lambda record: record.worker).items():
            band: list[WorkerRan] = []
            for record in [*sorted(records, key=lambda record: record.ran.start), None]:
                if band and (record is None or record.ran.scope != band[0].ran.scope):
                    if band[0].ran.scope:
                        start, end = band[0].ran.start, max(each.ran.end for each in band)
                        yield self._slice(FIRST_WORKER + worker, SCOPES, band[0].ran.scope, start, end, {})
                    band = []
                if record is not None:
                    band.append(record)

    def _flows_to_workers(self) -> Iterator[Entry]:
        """Arrows from the line of a client to the op on each worker."""
        issued = {record.output: record for record in self._issued}
        for record in self._ran:
            ran = record.ran
            found = next((issued[ident] for ident in ran.outputs if ident in issued), None)
            if found is not None and found.time <= ran.start:
                source = (FIRST_CLIENT + found.session, OPS, found.time)
                yield from self._arrow("op", source, (FIRST_WORKER + record.worker, _thread(ran), ran.start))

    # Counters

    def _memory(self) -> Iterator[Entry]:
        for sample in self._samples:
            yield self._counter(FIRST_WORKER + sample.worker, "tensors", "MB", sample.time, sample.nbytes / 1e6)

    def _queues(self) -> Iterator[Entry]:
        """Ops that were sent to a worker and have not run: known for ops that make tensors."""
        changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        sent: set[tuple[int, int]] = set()
        for seen in self._seen:
            if seen.direction == "WORKER_SEND" and seen.outputs:
                worker = int(seen.peer.rpartition(" ")[2])
                sent.add((worker, seen.outputs[0]))
                changes[worker].append((seen.time, 1))
        for record in self._ran:
            outputs = record.ran.outputs
            if outputs and (record.worker, outputs[0]) in sent:
                changes[record.worker].append((record.ran.end, -1))
        for worker, steps in changes.items():
            depth = 0
            for when, change in sorted(steps):
                depth += change
                yield self._counter(FIRST_WORKER + worker, "queued", "ops", when, depth)

    # Entries

    def _slice(self, process: int, thread: int, name: str, start: int, end: int, arguments: Entry) -> Entry:
        return {
            "ph": "X",
            "pid": process,
            "tid": thread,
            "name": name,
            "cat": "gt",
            "ts": self._microseconds(start),
            "dur": max(end - start, 0) / 1000,
            "args": arguments,
        }

    def _counter(self, process: int, name: str, unit: str, when: int, value: float) -> Entry:
        """Perfetto shows the name and the unit, one after the other."""
        return {"ph": "C", "pid": process, "name": name, "ts": self._microseconds(when), "args": {unit: value}}

    def _arrow(self, name: str, source: tuple[int, int, int], target: tuple[int, int, int]) -> Iterator[Entry]:
        number = next(self._arrows)
        for phase, (process, thread, when) in (("s", source), ("f", target)):
            entry = {
                "ph": phase,
                "id": number,
                "pid": process,
                "tid": thread,
                "name": name,
                "cat": "flow",
                "ts": self._microseconds(when),
            }
            yield entry | ({"bp": "e"} if phase == "f" else {})

    def _microseconds(self, when: int) -> float:
        return (when - self._zero) / 1000


def _thread(ran: Ran) -> int:
    return TRANSFERS if ran.op in _TRANSFERS else COMPUTE


def _pieces(ran: Ran) -> list[tuple[int, int]]:
    """The times in which a command computes: all but its exchanges. The first piece is there even if it is empty, since
    the arrow of the client leads to it."""
    ends = [ran.start, *[swap.end for swap in ran.swaps]]
    starts = [*[swap.start for swap in ran.swaps], ran.end]
    first, *others = zip(ends, starts, strict=True)
    return [first, *[(start, end) for start, end in others if end > start]]


def _grouped(records: Iterable[Any], key: Any) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _metadata(name: str, process: int, thread: int, arguments: Entry) -> Entry:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": arguments}


def _process(process: int, name: str, place: int, threads: dict[int, str]) -> Iterator[Entry]:
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": place})
    for thread, label in threads.items():
        yield _metadata("thread_name", process, thread, {"name": label})
        yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})


LOG_SUFFIX = ".log"


def write_trace(path: Path, records: Iterable[Record], dropped: int) -> None:
    """Write a trace that Perfetto opens, or a log if the name of the file ends with `.log`. Raises SettingsError if the
    file cannot be written."""
    if path.suffix == LOG_SUFFIX:
        data = print_log(records).encode()
    else:
        data = msgspec.json.encode(chrome_trace(records, dropped))
    try:
        make_parents(path)
        _write(path, data)
    except OSError as error:
        raise SettingsError(f"the trace cannot be written to {path}: {error}") from None


def require_writable(path: Path) -> None:
    """Find out whether a trace can be written to a file, before anything is captured for it. Raises SettingsError."""
    try:
        make_parents(path)
        if os.path.lexists(path):
            open_text(path, "a").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise SettingsError(f"the trace cannot be written to {path}: {error}") from None


def _write(path: Path, data: bytes) -> None:
    """Write a file, or none: on a full disk, and after Ctrl-C, no part of it stays, which no tool could read."""
    try:
        with open_binary(path) as file:
            file.write(data)
    except BaseException:
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():  # a device stays
                path.unlink()
        raise


def print_log(records: Iterable[Record]) -> str:
    """Records in the columns of the instruction log."""
    text = FORMATS["text"]
    return text.header + "".join(map(text.line, trace_rows(records)))


def describe_gaps(dropped: int, missing: Sequence[int]) -> str:
    """What a trace does not have; empty if it is complete."""
    gaps = []
    if dropped:
        gaps.append(f"{dropped} records were over the limit and are not in it")
    if missing:
        workers = ", ".join(map(str, missing))
        gaps.append(f"workers {workers} were busy, or stopped, and did not send their commands in time")
    return "; ".join(gaps)
