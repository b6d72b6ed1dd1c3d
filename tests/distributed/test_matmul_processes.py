"""Products on worker processes, which exchange the windows of the next round while they multiply; and on none."""

import psutil
import pytest
import torch

import gt
from benchmarks.comparison.peers.process_memory import PeakMemory


def test_products_of_worker_processes_move_the_planned_bytes(monkeypatch):
    """Over Gloo, which goes on by itself; the tests of the worker have the other transports."""
    monkeypatch.setenv("GT_TRANSPORT", "gloo")
    gt.init(workers=2)
    mesh = gt.mesh(2, ("x",))
    a, b = torch.randn(30, 50), torch.randn(50, 26)
    for algo in (None, "ring", "summa"):
        x, y = gt.distribute(a, mesh, "x, -"), gt.distribute(b, mesh, "x, -")
        plan = gt.distributed.explain(x, y, out="x, -", algo=algo)
        with gt.debug.comm() as c:
            product = gt.distributed.matmul(x, y, out="x, -", algo=algo)
        assert (c.bytes, c.pairs) == (plan.bytes, plan.pairs) and c.bytes == 4 * 50 * 26
        assert all("gloo" in event.way for event in c.events)
        torch.testing.assert_close(product.cpu(), a @ b, rtol=1e-4, atol=1e-4)
    gt.shutdown()


def test_products_read_nothing_from_the_workers():
    """Where nothing is computed, a read would raise."""
    gt.init(workers=4, mode="shapes")
    mesh = gt.mesh((2, 2), ("x", "y"))
    a, b = gt.ones(8, 6, mesh=mesh, placements="x, y"), gt.ones(6, 4, mesh=mesh, placements="x, y")
    for algo in (None, "summa", "cannon"):
        assert gt.distributed.matmul(a, b, out="x, y", algo=algo).shape == (8, 4)
        assert gt.distributed.explain(a, b, out="x, y", algo=algo).bytes > 0
    gt.shutdown()


@pytest.mark.slow
def test_the_memory_of_worker_processes_never_holds_a_gathered_operand_in_rounds(monkeypatch):
    """As Linux counts it, at its peak. Workers that share memory keep an arena besides, of a size of its own."""
    monkeypatch.setenv("GT_TRANSPORT", "gloo")
    gt.init(workers=4)
    mesh = gt.mesh(4, ("x",))
    b = torch.randn(8192, 2048)  # 64 MiB
    x = gt.distribute(torch.randn(64, 8192), mesh, "x, -")
    grown = {}
    for algo in ("gather_b", "ring", "summa"):
        y = gt.distribute(b, mesh, "x, -")
        y.sum().item()
        peak = PeakMemory(each.pid for each in psutil.Process().children(recursive=True))
        gt.distributed.matmul(x, y, out="x, -", algo=algo, panel=128).sum().item()
        grown[algo] = peak.largest()
    gt.shutdown()
    assert grown["gather_b"] > b.nbytes, grown
    assert grown["ring"] < 0.75 * b.nbytes, grown  # two windows of a quarter each, and a product
    assert grown["summa"] < 0.25 * b.nbytes, grown
