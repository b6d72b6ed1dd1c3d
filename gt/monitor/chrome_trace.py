"""Records as a trace in Chrome's format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Each client, the dispatcher and each worker is a process of the trace. A worker has threads for its compute, its
collectives, its waits for other workers and its uploads and reads, and one with its scopes as bands. Arrows go from the
line of a client to the op on a worker, and from the worker that sends to the worker that receives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from gt.core.ids import short_id
from gt.core.message_events import BatchPlanned, OpIssued, WorkerRan, WorkerSampled
from gt.core.messages import Swapped
from gt.monitor.records import MessageSeen, Record

Entry: TypeAlias = dict[str, Any]
"""One entry of a trace, as the format has it."""

DISPATCHER, FIRST_CLIENT, FIRST_WORKER = 1, 100, 10_000  # process numbers in the trace
COMPUTE, COLLECTIVES, WAITS, TRANSFERS, SCOPES = range(1, 6)  # threads of a worker
OPS, CLIENT_WAITS = 1, 2  # threads of a client
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


class _Exchange(NamedTuple):
    """A worker's part of an exchange. `met` is the time at which the last of the workers came to it."""

    ran: WorkerRan
    swap: Swapped
    met: int


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
        yield _metadata("process_name", DISPATCHER, 0, {"name": "dispatcher"})
        yield _metadata("process_sort_index", DISPATCHER, 0, {"sort_index": 1})
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
            yield self._slice(DISPATCHER, 1, name, planned.start, planned.end, arguments)

    # Workers

    def _worker_ops(self) -> Iterator[Entry]:
        for worker, ran, site in self._each_ran():
            thread = TRANSFERS if ran.op in _TRANSFERS else COMPUTE
            arguments = {
                "line": site,
                "scope": ran.scope,
                "inputs": " ".join(f"%{short_id(ident)}" for ident in ran.inputs),
                "outputs": " ".join(f"%{short_id(ident)}" for ident in ran.outputs),
            }
            yield self._slice(FIRST_WORKER + worker, thread, ran.op, ran.start, ran.end, arguments)

    def _each_ran(self) -> Iterator[tuple[int, Any, str]]:
        for record in self._ran:
            yield record.worker, record.ran, record.site

    def _exchanges(self) -> Iterator[Entry]:
        """Collectives, the waits for other workers in them, and arrows from senders to receivers."""
        for number, group in enumerate(met_exchanges(self._ran)):
            begun = {exchange.ran.worker: exchange for exchange in group}
            for exchange in group:
                process, swap = FIRST_WORKER + exchange.ran.worker, exchange.swap
                arguments = {
                    "line": exchange.ran.site,
                    "op": exchange.ran.ran.op,
                    "bytes sent": sum(nbytes for _, nbytes in swap.sends),
                    "bytes received": sum(nbytes for _, nbytes in swap.receives),
                }
                kind = swap.kind or "exchange"
                if exchange.met > swap.start:
                    late = max(group, key=lambda other: other.swap.start).ran.worker
                    name = f"wait for worker {late}"
                    yield self._slice(process, WAITS, name, swap.start, exchange.met, {"line": exchange.ran.site})
                yield self._slice(process, COLLECTIVES, kind, exchange.met, swap.end, arguments)
                for peer, _ in swap.receives:
                    if peer in begun:
                        flow = f"exchange {number} {peer} {exchange.ran.worker}"
                        sender = begun[peer]
                        yield from self._arrow(
                            flow,
                            (FIRST_WORKER + peer, COLLECTIVES, sender.met),
                            (process, COLLECTIVES, max(exchange.met, swap.end - 1)),
                        )

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
        for worker, ran, _ in self._each_ran():
            found = next((issued[ident] for ident in ran.outputs if ident in issued), None)
            if found is not None and found.time <= ran.start:
                thread = TRANSFERS if ran.op in _TRANSFERS else COMPUTE
                source = (FIRST_CLIENT + found.session, OPS, found.time)
                yield from self._arrow(
                    f"op {found.output} {worker}", source, (FIRST_WORKER + worker, thread, ran.start)
                )

    # Counters

    def _memory(self) -> Iterator[Entry]:
        for sample in self._samples:
            yield self._counter(
                FIRST_WORKER + sample.worker, "memory of tensors (MB)", sample.time, sample.nbytes / 1e6
            )

    def _queues(self) -> Iterator[Entry]:
        """Ops that were sent to a worker and have not run: known for ops that make tensors."""
        changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        sent: set[tuple[int, int]] = set()
        for seen in self._seen:
            if seen.direction == "WORKER_SEND" and seen.outputs:
                worker = int(seen.peer.rpartition(" ")[2])
                sent.add((worker, seen.outputs[0]))
                changes[worker].append((seen.time, 1))
        for worker, ran, _ in self._each_ran():
            if ran.outputs and (worker, ran.outputs[0]) in sent:
                changes[worker].append((ran.end, -1))
        for worker, steps in changes.items():
            depth = 0
            for when, change in sorted(steps):
                depth += change
                yield self._counter(FIRST_WORKER + worker, "ops in the queue", when, depth)

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

    def _counter(self, process: int, name: str, when: int, value: float) -> Entry:
        return {"ph": "C", "pid": process, "name": name, "ts": self._microseconds(when), "args": {"value": value}}

    def _arrow(self, name: str, source: tuple[int, int, int], target: tuple[int, int, int]) -> Iterator[Entry]:
        for phase, (process, thread, when) in (("s", source), ("f", target)):
            entry = {
                "ph": phase,
                "id": name,
                "pid": process,
                "tid": thread,
                "name": name.partition(" ")[0],
                "cat": "flow",
                "ts": self._microseconds(when),
            }
            yield entry | ({"bp": "e"} if phase == "f" else {})

    def _microseconds(self, when: int) -> float:
        return (when - self._zero) / 1000


def met_exchanges(ran: Iterable[WorkerRan]) -> list[list[_Exchange]]:
    """The exchanges among workers: each is the parts of its workers, which are the same swap of the same command."""
    parts: dict[tuple[Any, ...], list[tuple[WorkerRan, Swapped]]] = {}
    for record in ran:
        for number, swap in enumerate(record.ran.swaps):
            key = (record.ran.session, record.ran.op, record.ran.outputs, number)
            parts.setdefault(key, []).append((record, swap))
    exchanges = []
    for members in parts.values():
        by_worker = {record.worker: swap for record, swap in members}
        group = []
        for record, swap in members:
            peers = [peer for peer, _ in swap.receives if peer in by_worker]
            met = max([swap.start, *[by_worker[peer].start for peer in peers]])
            group.append(_Exchange(record, swap, min(met, swap.end)))
        exchanges.append(group)
    return exchanges


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
