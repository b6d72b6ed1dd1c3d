"""The limit on the bytes of copies that a worker holds, and the copies that are dropped to stay within it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gt.dispatcher.tensor_records import TensorRecord
from gt.dispatcher.tensor_tables import TensorTables
from gt.dispatcher.worker_records import WorkerRecord
from gt.sharding.spec import ShardingSpec

SHARE_OF_COPIES = 0.5  # of a worker's memory, if the user names no limit


def default_limit(workers: Iterable[WorkerRecord]) -> int | None:
    """Half of the memory of the worker that has the least; workers of one device share its memory. None if the memory
    of no worker is known."""
    sharing: dict[tuple[str, str], list[int]] = {}
    for worker in workers:
        if worker.memory:
            sharing.setdefault((worker.info.host, worker.info.device), []).append(worker.memory)
    return min((int(SHARE_OF_COPIES * min(sizes) / len(sizes)) for sizes in sharing.values()), default=None)


def copies_to_drop(
    tables: TensorTables, limit: int, tensor: TensorRecord, spec: ShardingSpec, in_use: Collection[int]
) -> list[int]:
    """The least recently used copies to drop, so that no worker holds more than `limit` bytes of copies when it gets a
    new copy of `tensor` in the layout `spec`. Copies that are `in_use` stay, even if the limit is exceeded."""
    nbytes = TensorRecord.of(tensor.meta, spec).nbytes
    if sum(tables.copy_bytes.values()) + nbytes <= limit:
        return []
    excess = {
        worker: sum(held for mesh, held in tables.copy_bytes.items() if worker in mesh) + nbytes - limit
        for worker in spec.mesh.workers
    }
    dropped: list[int] = []
    for copy, (ident, layout) in tables.copy_order.items():
        if max(excess.values()) <= 0:
            break
        held = [worker for worker in layout.mesh.workers if excess.get(worker, 0) > 0]
        if held and copy not in in_use:
            dropped.append(copy)
            freed = TensorRecord.of(tables.tensors[ident].meta, layout).nbytes
            excess.update({worker: excess[worker] - freed for worker in layout.mesh.workers if worker in excess})
    return dropped
