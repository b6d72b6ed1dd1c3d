"""The workers of a program or server as a list that people can read."""

from __future__ import annotations

from gt.core.messages import ListedWorker
from gt.core.readable_units import print_bytes


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
