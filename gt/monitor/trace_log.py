"""Records of a capture as the rows of a log: messages, and the starts and ends of commands and exchanges on workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from gt.core.message_events import WorkerRan
from gt.core.messages import Swapped
from gt.monitor.activity import MessageSeen, Record
from gt.monitor.log_rows import LogRow, print_ids, printable, row_of


class MetExchange(NamedTuple):
    """A worker's part of an exchange. `met` is the time at which the last of those that it receives from came to it,
    and `late` is that worker; None if this worker was the last."""

    ran: WorkerRan
    swap: Swapped
    met: int
    late: int | None


def met_exchanges(ran: Iterable[WorkerRan]) -> list[list[MetExchange]]:
    """Each exchange as the parts of its workers. They are the same exchange of the same command, and a command that a
    worker runs for the second time is another one."""
    times: Counter[tuple[Any, ...]] = Counter()
    parts: dict[tuple[Any, ...], dict[int, tuple[WorkerRan, Swapped]]] = {}
    for record in ran:
        command = (record.ran.session, record.ran.op, record.ran.outputs)
        times[(record.worker, *command)] += 1
        for number, swap in enumerate(record.ran.swaps):
            key = (*command, times[(record.worker, *command)], number)
            parts.setdefault(key, {})[record.worker] = (record, swap)
    return [_meet(members) for members in parts.values()]


def _meet(members: dict[int, tuple[WorkerRan, Swapped]]) -> list[MetExchange]:
    exchange = []
    for record, swap in members.values():
        came = [(members[peer][1].start, peer) for peer, _ in swap.receives if peer in members]
        last, late = max(came, default=(swap.start, record.worker))
        is_late = last > swap.start
        met = min(last, swap.end) if is_late else swap.start
        exchange.append(MetExchange(record, swap, met, late if is_late else None))
    return exchange


RUN, DONE = "WORKER_RUN", "WORKER_DONE"
COMMAND, EXCHANGE = "Run", "Exchange"
NANOSECONDS = 1e-9


def trace_rows(records: Iterable[Record]) -> list[LogRow]:
    """All messages, commands and exchanges in the order of time, numbered from 1. The first is at 0 seconds."""
    records = list(records)
    timed = sorted(_timed(records), key=lambda pair: pair[0])
    zero = timed[0][0] if timed else 0
    return [
        replace(row, elapsed=round((when - zero) * NANOSECONDS, 6), seq=seq) for seq, (when, row) in enumerate(timed, 1)
    ]


def _timed(records: list[Record]) -> Iterator[tuple[int, LogRow]]:
    """Rows with their times, in nanoseconds."""
    for record in records:
        if isinstance(record, MessageSeen):
            yield record.time, row_of(record, 0.0, 0)
    commands = [record for record in records if isinstance(record, WorkerRan)]
    numbers = {id(record): number for number, record in enumerate(commands, 1)}
    for command in commands:
        yield from _command_rows(command, numbers[id(command)])
    for number, group in enumerate(met_exchanges(commands), 1):
        for part in group:
            yield from _exchange_rows(part.ran, part.swap, numbers[id(part.ran)], number)


def _command_rows(record: WorkerRan, number: int) -> Iterator[tuple[int, LogRow]]:
    """The rows of a command. `run` is its number: equal at its start and its end."""
    for when, direction in ((record.ran.start, RUN), (record.ran.end, DONE)):
        details = {"run": str(number), **_scope(record)}
        yield when, _row(record, direction, COMMAND, record.ran.op, None, details)


def _exchange_rows(record: WorkerRan, swap: Swapped, number: int, exchange: int) -> Iterator[tuple[int, LogRow]]:
    """The rows of an exchange. `exchange` is its number, equal on all its workers; `run` is that of its command;
    `peers` are the bytes that were received from each peer, and `sends` those that were sent."""
    details = {"run": str(number), "exchange": str(exchange), **_scope(record)}
    for name, pairs in (("peers", swap.receives), ("sends", swap.sends)):
        if pairs:
            details[name] = ",".join([f"{peer}:{nbytes}" for peer, nbytes in pairs])
    received = sum([nbytes for _, nbytes in swap.receives])
    for when, direction in ((swap.start, RUN), (swap.end, DONE)):
        yield when, _row(record, direction, EXCHANGE, swap.kind or "exchange", received, details)


def _row(
    record: WorkerRan, direction: str, command: str, op: str, nbytes: int | None, details: dict[str, str]
) -> LogRow:
    ids = print_ids(record.ran.inputs, record.ran.outputs)
    peer, site = f"worker {record.worker}", printable(record.site)
    return LogRow(0.0, 0, direction, peer, command, nbytes, ids, printable(op), site, details)


def _scope(record: WorkerRan) -> dict[str, str]:
    return {"scope": printable(record.ran.scope)} if record.ran.scope else {}
