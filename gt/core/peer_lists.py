"""The workers and the sessions of a server as lists that people can read."""

from __future__ import annotations

from gt.core.messages import ListedSession, ListedWorker
from gt.core.readable_units import print_bytes

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_SHOWN_WORKERS = 4  # whose bytes are shown one by one


class SessionList(list[ListedSession]):
    """Sessions in the order of their ids. It prints as a table."""

    def __repr__(self) -> str:
        heads = ("id", "key", "host", "pid", "program", "since", "tensors", "held", "in flight", "state")
        rows = [heads, *map(_session_row, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def _session_row(session: ListedSession) -> tuple[str, ...]:
    return (
        str(session.session),
        session.key or "-",
        session.host,
        str(session.pid),
        session.program or "-",
        _print_age(session.seconds),
        str(session.tensors),
        _print_held(session.held),
        str(session.in_flight),
        session.state,
    )


def _print_held(held: tuple[tuple[int, int], ...]) -> str:
    """The bytes on each worker, `0: 4 MB 1: 4 MB`; on many workers, the most and their number."""
    holding = {worker: nbytes for worker, nbytes in held if nbytes}
    if len(holding) > _SHOWN_WORKERS:
        return f"{len(holding)} workers: {print_bytes(max(holding.values()))} each at most"
    return " ".join(f"{worker}: {print_bytes(nbytes)}" for worker, nbytes in holding.items()) or "0 B"


def _print_age(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} days"


class WorkerList(list[ListedWorker]):
    """Workers in the order of their ids. It prints as a table."""

    def __repr__(self) -> str:
        rows = [("id", "host", "pid", "device", "memory", "held", "state"), *map(_row, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def _row(worker: ListedWorker) -> tuple[str, ...]:
    memory = print_bytes(worker.memory) if worker.memory else "unknown"
    held = print_bytes(worker.held)
    return (str(worker.worker), worker.host, str(worker.pid), worker.device, memory, held, worker.state)
