"""The limits of a session: whether it may hold more tensors, and the copies that are dropped before it may not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gt.core.ids import session_of
from gt.core.tables import print_bytes
from gt.dispatcher.instruction_errors import LimitExceeded
from gt.dispatcher.tensor_records import TensorRecord
from gt.dispatcher.tensor_tables import TensorTables
from gt.sharding.spec import DeviceMesh

_ADVICE = "free tensors that are not needed, or ask for a larger limit (python -m gt.server --limits)"


def fits(tables: TensorTables, session: int, nbytes: int, tensors: int) -> bool:
    """Whether a session may hold `tensors` more tensors of `nbytes` in all, on any workers. False where that depends on
    the workers."""
    limits, use = tables.limits, tables.uses.get(session)
    if limits is None or use is None:
        return True
    if limits.tensors is not None and use.tensors + tensors > limits.tensors:
        return False
    return limits.bytes is None or sum(use.bytes_on.values()) + nbytes <= limits.bytes


def copies_over_limit(
    tables: TensorTables, session: int, new: Sequence[TensorRecord], tensors: int, in_use: Collection[int] = ()
) -> list[int]:
    """The copies of a session that are dropped so that it may hold the memory of `new`, which counts as `tensors`
    tensors. Raises LimitExceeded if that is not enough. Copies that are `in_use` stay."""
    if fits(tables, session, sum([tensor.nbytes for tensor in new]), tensors):
        return []
    limits, use = tables.limits, tables.uses[session]
    assert limits is not None, "without limits everything fits"
    if limits.tensors is not None and use.tensors + tensors > limits.tensors:
        raise LimitExceeded(
            f"this session holds {use.tensors} tensors, and {limits.tensors} is its limit; the op makes "
            f"{tensors or 'some'} more. Nothing was run or allocated; {_ADVICE}"
        )
    if limits.bytes is None or not new:
        return []
    more = _bytes_by_worker(new)
    excess = {worker: use.bytes_at(worker) + nbytes - limits.bytes for worker, nbytes in more.items()}
    dropped = _copies_to_drop(tables, session, excess, in_use)
    worker = max(excess, key=lambda worker: excess[worker])
    if excess[worker] > 0:
        needs = f"{print_bytes(more[worker])} more" if more[worker] else "an amount that is not known before"
        raise LimitExceeded(
            f"this session holds {print_bytes(use.bytes_at(worker))} on worker {worker}, and "
            f"{print_bytes(limits.bytes)} is its limit; the op needs {needs} there. Nothing was run or allocated; "
            f"{_ADVICE}"
        )
    return dropped


def _bytes_by_worker(new: Sequence[TensorRecord]) -> dict[int, int]:
    by_mesh: dict[DeviceMesh, int] = {}
    for tensor in new:
        by_mesh[tensor.spec.mesh] = by_mesh.get(tensor.spec.mesh, 0) + tensor.nbytes
    found: dict[int, int] = {}
    for mesh, nbytes in by_mesh.items():
        for worker in mesh.workers:
            found[worker] = found.get(worker, 0) + nbytes
    return found


def _copies_to_drop(tables: TensorTables, session: int, excess: dict[int, int], in_use: Collection[int]) -> list[int]:
    """The least recently used copies of a session on workers with an excess of bytes, which is reduced by them."""
    dropped: list[int] = []
    for copy, (ident, layout) in tables.copy_order.items():
        if max(excess.values()) <= 0:
            break
        held = [worker for worker in layout.mesh.workers if excess.get(worker, 0) > 0]
        if held and copy not in in_use and session_of(copy) == session:
            dropped.append(copy)
            freed = TensorRecord.of(tables.tensors[ident].meta, layout).nbytes
            excess.update({worker: excess[worker] - freed for worker in layout.mesh.workers if worker in excess})
    return dropped
