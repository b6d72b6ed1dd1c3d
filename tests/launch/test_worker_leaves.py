"""A worker of a server that gets SIGTERM gives its tensors to the others before it ends, and sessions go on."""

import contextlib
import signal

import psutil
import pytest
import torch

import gt
from gt.client import active_session
from gt.worker import termination
from tests.subprocesses import finish, running, start, start_server, wait_for_workers, wait_until


@contextlib.contextmanager
def connected(workers, **environment):
    """The processes of a server's workers by id; this process is connected to the server."""
    main, port = start_server()
    processes = [start("-m", "gt.worker", "-p", str(port), "--threads", "1", **environment) for _ in range(workers)]
    with running(main, *processes):
        wait_for_workers(port, workers)
        gt.connect(f"localhost:{port}", min_workers=workers)
        try:
            by_pid = {process.pid: process for process in processes}
            yield {info.worker: by_pid[info.pid] for info in active_session.current().workers}
        finally:
            gt.shutdown()


def leave(process):
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0


def network(nn):
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train(model, optimizer, batch, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


@pytest.mark.parametrize(("workers", "left"), [(3, "x, - on [0, 2]"), (2, "x, - on [0]")], ids=["a spare one", "none"])
def test_whole_and_cut_tensors_keep_values_and_layouts(fault, workers, left):
    values = [torch.randn(5, 3) for _ in range(6)]
    with connected(workers) as processes:
        mesh = gt.DeviceMesh((2,), ("x",), (0, 1))
        whole = [gt.to(value) for value in values]
        cut = [gt.distribute(value, mesh, gt.Shard(0)) for value in values]
        products = [a @ b.t() for a, b in zip(whole, cut, strict=True)]
        leave(processes[1])
        for value, *ours, product in zip(values, whole, cut, products, strict=True):
            assert all(torch.equal(each.cpu(), value) for each in ours)
            torch.testing.assert_close(product.cpu(), value @ value.t())
        assert {f"{each.spec} on {list(each.spec.mesh.workers)}" for each in cut} == {left}
        torch.testing.assert_close((cut[0] + whole[1]).exp().cpu(), (values[0] + values[1]).exp())
    fault("a worker of a server gets SIGTERM", "its tensors move to other workers; programs go on")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_training_goes_on_as_torch_does(compiled, cut):
    batch = torch.randn(6, 8)
    twin = network(torch.nn)
    with connected(3) as processes:
        model = network(torch.nn)
        model.load_state_dict(twin.state_dict())
        mesh = gt.DeviceMesh((2,), ("dp",), (0, 1))
        gt.to(model)
        for parameter in model.parameters() if cut else ():
            parameter.data = gt.distribute(parameter.data, mesh, gt.Shard(0))
        ours, theirs = (torch.optim.AdamW(each.parameters(), 0.01) for each in (model, twin))
        run = gt.compile(train) if compiled else train
        x = gt.to(batch)
        losses = [loss for _ in range(4) for loss in run(model, ours, x, 3)]
        processes[1].send_signal(signal.SIGTERM)
        losses += [loss for _ in range(4) for loss in run(model, ours, x, 3)]
        assert finish(processes[1])[0] == 0
        losses += [loss for _ in range(2) for loss in run(model, ours, x, 3)]
        expected = train(twin, theirs, batch, 30)
        for loss, other in zip(losses, expected, strict=True):
            torch.testing.assert_close(loss.item(), other.item(), rtol=1e-3, atol=1e-5)
        workers = {ours.state[parameter]["exp_avg"].spec.mesh.workers for parameter in model.parameters()}
        assert workers == {(0, 2)} if cut else workers <= {(0,), (2,)}


def test_tensors_that_cannot_move_in_time_are_lost(fault):
    with connected(2, GT_DRAIN="1") as processes:
        x = gt.ones(4, mesh=gt.mesh(2), placements=[gt.Shard(0)])
        assert x.sum().item() == 4
        other = psutil.Process(processes[0].pid)
        other.suspend()
        leave(processes[1])
        other.resume()
        with pytest.raises(gt.WorkerLost, match="SIGTERM") as error:
            x.sum().item()
        assert gt.ones(3).sum().item() == 3
    fault("a worker of a server gets SIGTERM, and its tensors cannot move in time", error.value)


def test_a_second_sigterm_ends_a_worker_at_once():
    with connected(2, GT_DRAIN="3600") as processes:
        assert gt.ones(4, mesh=gt.mesh(2), placements=[gt.Shard(0)]).sum().item() == 4
        other = psutil.Process(processes[0].pid)
        other.suspend()
        processes[1].send_signal(signal.SIGTERM)
        wait_until(lambda: gt.workers()[1].state == "leaving", what="the news that it leaves")
        processes[1].send_signal(signal.SIGTERM)
        finish(processes[1], termination.ENDING_SECONDS + 10)
        other.resume()
