"""Exchanges of tensors between workers. A transport is one file and one line in the table below."""

from __future__ import annotations

from collections.abc import Callable

from gt.worker.exchange.in_process import MemoryExchange
from gt.worker.exchange.interface import Exchange, LookAhead
from gt.worker.exchange.process_groups import GroupExchange

TRANSPORTS: dict[str, Callable[[int, str, LookAhead], Exchange]] = {
    "memory": lambda worker, device, look_ahead: MemoryExchange(),
    "process groups": GroupExchange,
}


def make_exchange(transport: str, worker: int, device: str, look_ahead: LookAhead = lambda: None) -> Exchange:
    """The exchange of a worker that computes on `device`."""
    return TRANSPORTS[transport](worker, device, look_ahead)


__all__ = ["TRANSPORTS", "Exchange", "make_exchange"]
