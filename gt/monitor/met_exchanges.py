"""The exchanges among workers: the parts of the workers that belong together, and who waited for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from gt.core.message_events import WorkerRan
from gt.core.messages import Swapped


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
