"""Products in rounds on worker processes, which exchange the windows of the next round while they multiply."""

import torch

import gt


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
