"""`gt.calibrate`: measures the speeds of the workers and of their links once, and stores them for later plans."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gt.client import active_session
from gt.client.layouts import mesh as make_mesh
from gt.client.tensor import Tensor, to_gt
from gt.core.errors import SessionError
from gt.core.messages import can_overlap, hosts_of
from gt.core.output_files import make_parents, open_binary
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.calibration import Calibration, calibration_path, format_calibration
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole

_SIZE = 512  # side of the matrices whose products are timed
_LARGE = 1 << 22  # elements of a large tensor
_REPEATS = 15  # the shortest counts: other programs may run
_FEWEST, _ENOUGH = 3, 3.0  # repeats of slow work, and the seconds after which there are no more
_SIDE = 2048  # side of the weight whose gradient is reduced while products go on: more than a bucket


@ends_on_users_line
def calibrate(path: str | os.PathLike[str] | None = None) -> Calibration:
    """Measure the workers of this session and their links, and store the result for `gt.auto_shard`, in the user's
    cache directory if no path is given. With workers on several hosts, links within hosts and between them are
    measured apart. Takes some seconds.

    >>> gt.init(workers=2, mode="virtual")
    >>> gt.calibrate("speeds.json").source
    'measured on 2 workers (cpu)'
    """
    session = active_session.current()
    if not session.computes:
        raise SessionError("gt.calibrate() measures workers, and mode='shapes' has none; start some with gt.init()")
    count = len(session.workers)
    hosts = len(set(hosts_of(session.workers).values()))
    where = f"{count} workers of {hosts} hosts" if hosts > 1 else f"{count} workers"
    measured = _measure(count, f"measured on {where} ({session.workers[0].device})")
    file = Path(path) if path is not None else calibration_path()
    make_parents(file)
    with open_binary(file, 0o600) as stream:
        stream.write(format_calibration(measured))
    return measured


def _measure(count: int, source: str) -> Calibration:
    """All workers compute at the same time, as they do in a step: they may share the memory and the cores of a host."""
    mesh = make_mesh(count)
    everywhere = whole(mesh, 2)
    square = to_gt(torch.rand(_SIZE, _SIZE), everywhere)
    small = to_gt(torch.rand(4, 4), everywhere)
    large = to_gt(torch.rand(count * 8, _LARGE // (count * 8)), everywhere)
    op_seconds = _best(lambda: _chain(small, 50)) / 50
    product = max(_best(lambda: square @ square) - op_seconds, 1e-9)
    copied = max(_best(lambda: large + 1) - op_seconds, 1e-9)
    speeds = {
        "flops": 2 * _SIZE**3 / product,
        "memory_bandwidth": 2 * 4 * large.numel() / copied,
        "op_seconds": op_seconds,
        "source": source,
    }
    if count == 1:
        return Calibration(**speeds)  # type: ignore[arg-type]
    overlap = _measure_overlap(square, product, count) if can_overlap(active_session.current().workers) else 0.0
    return Calibration(**speeds, **_measure_links(), overlap=overlap)  # type: ignore[arg-type]


def _measure_links() -> dict[str, float]:
    """The speeds of links within hosts, and of those between hosts if there are several."""
    workers = active_session.current().workers
    by_host: dict[str, list[int]] = {}
    for worker, host in sorted(hosts_of(workers).items()):
        by_host.setdefault(host, []).append(worker)
    if len(by_host) == 1:
        fixed, bandwidth = _measure_gathers(make_mesh(len(workers)), "axis0")
        return {"message_seconds": fixed, "link_bandwidth": bandwidth}
    found: dict[str, float] = {}
    rows = [own for own in by_host.values() if len(own) > 1]
    if rows:
        fixed, bandwidth = _measure_gathers(_grid(rows), "columns")
        found |= {"message_seconds": fixed, "link_bandwidth": bandwidth}
    grid = _grid(list(by_host.values()))
    fixed, bandwidth = _measure_gathers(grid, "rows")
    sharing = grid.axis_size("columns")  # workers of a host, all of which receive at the same time
    return found | {"host_message_seconds": fixed, "host_bandwidth": bandwidth * sharing}


def _grid(rows: Sequence[Sequence[int]]) -> DeviceMesh:
    """A mesh with a host in each row: as many workers of each as the smallest has."""
    length = min(map(len, rows))
    return make_mesh((len(rows), length), ("rows", "columns"), [worker for row in rows for worker in row[:length]])


def _measure_gathers(mesh: DeviceMesh, axis: str) -> tuple[float, float]:
    """The time of a message along an axis, and the bytes a second that each worker receives, from gathers of a small
    and of a large tensor, in all groups along the axis at the same time."""
    count = mesh.axis_size(axis)
    cut, everywhere = ShardingSpec(mesh, [[axis], []]), whole(mesh, 2)
    tiny = to_gt(torch.rand(count, 4), cut)
    large = to_gt(torch.rand(count * 8, _LARGE // (count * 8)), cut)
    fixed = _best(lambda: tiny.redistribute(placements=everywhere))
    gathered = max(_best(lambda: large.redistribute(placements=everywhere)) - fixed, 1e-9)
    return fixed / (count - 1), 4 * large.numel() * (count - 1) / count / gathered


def _measure_overlap(square: Tensor, product: float, count: int) -> float:
    """The share of the time of a reduction of gradients in which workers compute products: how much less both together
    take than one after the other."""
    mesh = make_mesh(count)
    weight = to_gt(torch.rand(_SIDE, _SIDE), whole(mesh, 2)).requires_grad_()
    rows = to_gt(torch.rand(count, _SIDE), ShardingSpec(mesh, [mesh.axis_names, ()]))

    def reduce() -> None:
        weight.grad = None
        (rows @ weight).sum().backward()

    def compute() -> list[torch.Tensor]:
        return [square @ square for _ in range(products)]

    def do_both() -> list[torch.Tensor]:
        reduce()
        return compute()

    reduced = _best(reduce)
    products = max(1, round(reduced / product))
    computed, both = _best(compute), _best(do_both)
    return min(max((reduced + computed - both) / min(reduced, computed), 0.0), 1.0)


def _chain(tensor: Tensor, length: int) -> torch.Tensor:
    result: torch.Tensor = tensor
    for _ in range(length):
        result = result + 1
    return result


def _best(work: Callable[[], object]) -> float:
    """The shortest of some times of a piece of work, from its start until all workers are done. A slow one is done a
    few times only."""
    session, times = active_session.current(), list[float]()
    while len(times) < _REPEATS and (len(times) < _FEWEST or sum(times) < _ENOUGH):
        session.synchronize()
        start = time.perf_counter()
        result = work()
        session.synchronize()
        times.append(time.perf_counter() - start)
        del result
    return min(times)
