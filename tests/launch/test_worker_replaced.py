"""A session goes on when one of its workers is killed and another one joins."""

import contextlib
import os
import signal

import pytest
import torch

import gt
from gt.client import active_session
from tests.subprocesses import running, serving, start, wait_until


@pytest.fixture
def server():
    """The port of a server with two workers, to which this process is connected."""
    with serving(2) as port:
        gt.connect(f"localhost:{port}")
        yield str(port)
        gt.shutdown()


def there():
    """The workers that the session knows of, after a read that lets it receive the latest."""
    with contextlib.suppress(gt.WorkerLost):
        gt.ones(1).sum().item()
    return [info.worker for info in active_session.current().workers]


def kill(worker):
    (info,) = [info for info in active_session.current().workers if info.worker == worker]
    os.kill(info.pid, signal.SIGKILL)
    wait_until(lambda: worker not in there(), what="the loss of the worker")


def test_tensors_are_created_after_a_loss_and_signals_name_the_replacement(server):
    assert gt.ones(4, 4).spec.mesh.workers == (0, 1)
    gt.register_config("pair", gt.SignalConfig(shard=gt.ShardConfig(axis=0, workers=[0, 2])))
    kill(1)
    assert gt.ones(4, 4).sum().item() == 16 and gt.ones(4, 4).spec.mesh.workers == (0,)
    with pytest.raises(gt.SignalError, match="needs workers"), gt.signal.context("pair"):
        gt.ones(4, 4)
    with pytest.raises(gt.LayoutError, match="there are"):
        gt.mesh(2)
    with running(start("-m", "gt.worker", "--threads", "1", "-p", server)):
        wait_until(lambda: there() == [0, 2], what="the replacement")
        with gt.signal.context("pair"):
            made = gt.ones(4, 4) + 1
        assert made.spec.mesh.workers == (0, 2) and made.sum().item() == 32
        assert gt.ones(4, 4).spec.mesh.workers == (0, 2)
        assert gt.mesh(2).workers == (0, 2)
        gt.shutdown()


def step(x, w):
    """Data parallel: the gradient is summed over the workers, which all hold the weight."""
    gradient = x.T @ (x @ w + 1)
    w -= 0.125 * gradient
    return gradient


@pytest.mark.parametrize("hears", [False, True], ids=["while it runs", "before it is planned"])
def test_weights_of_the_step_in_which_a_worker_is_lost_can_be_recovered(hears):
    gt.init(workers=3)
    try:
        mesh = gt.mesh(3, ("dp",))
        x = gt.ones(3, 2, mesh=mesh, placements="dp, -")
        w = gt.zeros(2, 2, mesh=mesh, placements="-, -")
        for _ in range(2):
            step(x, w)
        before = w.cpu()
        expected = torch.ones(3, 2).T @ (torch.ones(3, 2) @ before + 1)
        os.kill(active_session.current().workers[2].pid, signal.SIGKILL)
        if hears:
            wait_until(lambda: 2 not in there(), what="the loss of the worker")
        gradients = [step(x, w) for _ in range(2)]
        with pytest.raises(gt.WorkerLost):
            gradients[0].sum().item()
        with pytest.raises(gt.WorkerLost):
            w.tolist()
        view = w[0]
        gt.recover(w)
        assert torch.equal(w.cpu(), before) or torch.equal(w.cpu(), before - 0.125 * expected)
        assert view.tolist() == w.tolist()[0]
        w += 1
        assert w.sum().item() == w.cpu().sum().item()
        with pytest.raises(gt.RecoveryError, match="Load a checkpoint") as caught:
            gt.recover(x)  # it was cut, and a part of it is gone
        assert isinstance(caught.value.__cause__, gt.WorkerLost)
    finally:
        gt.shutdown()


PLAN = """
named: {shard: {axis: 0, workers: [0, 1]}}
any: {shard: {axis: 0, workers: all}}
model: {mesh: {dp: 2, tp: 1}, workers: [0, 1]}
"""


def test_recover_says_how_a_plan_reads_for_the_workers_that_are_left(no_signals, caplog, tmp_path):
    (tmp_path / "plan.yaml").write_text(PLAN)
    gt.init(workers=2)
    try:
        gt.load_config(tmp_path / "plan.yaml")
        model = gt.to(torch.nn.Linear(2, 2))
        os.kill(active_session.current().workers[1].pid, signal.SIGKILL)
        wait_until(lambda: 1 not in there(), what="the loss of the worker")
        gt.recover(model)
        told = [record.message.partition("plan.yaml:")[2] for record in caplog.records if record.name == "gt.client"]
        assert [
            text.replace(" needs workers that are not there; for those that are left it reads", "") for text in told
        ] == [
            "2: signal 'named' `workers: [0]`, for any number `workers: all`",
            "4: model `mesh: {dp: 1, tp: 1}, workers: [0]`, for any number `workers: all`",
        ]
        with gt.signal.context("any"):
            assert (gt.ones(4, 2) + 1).spec.mesh.workers == (0,)
    finally:
        gt.shutdown()


def test_plain_operands_that_went_to_a_lost_worker_are_uploaded_anew():
    gt.init(workers=2)
    try:
        x = gt.replicate(gt.ones(3), gt.mesh(2))
        assert x.sum().item() == 3
        plain = [torch.full((3,), float(number)) for number in range(8)]
        os.kill(active_session.current().workers[1].pid, signal.SIGKILL)
        issued = [x + operand for operand in plain]  # before the loss is known
        wait_until(lambda: 1 not in there(), what="the loss of the worker")
        assert [(x + operand).sum().item() for operand in plain] == [3.0 + 3 * number for number in range(8)]
        del issued
    finally:
        gt.shutdown()


@pytest.mark.parametrize("layout", ["-, -", "dp, -"])
def test_a_lost_tensor_that_is_overwritten_has_a_value_again(layout):
    gt.init(workers=2)
    try:
        mesh = gt.mesh(2, ("dp",))
        lost = gt.distribute(gt.ones(2, 2), mesh, "dp, -")
        former = gt.distribute(gt.ones(2, 2), mesh, layout)
        assert lost.sum().item() == former.sum().item() == 4
        os.kill(active_session.current().workers[1].pid, signal.SIGKILL)
        wait_until(lambda: 1 not in there(), what="the loss of the worker")
        former.add_(lost)
        for tensor in (lost, former):
            with pytest.raises(gt.WorkerLost):
                tensor.tolist()
            assert tensor.copy_(torch.full((2, 2), 3.0)).tolist() == [[3, 3], [3, 3]]
            assert tensor.mul_(2).zero_().add_(1).tolist() == [[1, 1], [1, 1]]
    finally:
        gt.shutdown()


def test_plain_operands_that_found_no_worker_are_uploaded_when_one_has_joined(server):
    kill(1)
    with contextlib.suppress(gt.WorkerLost):
        kill(0)
    with pytest.raises(gt.WorkerLost):
        (gt.zeros(3) + torch.ones(3)).sum().item()
    with running(start("-m", "gt.worker", "--threads", "1", "-p", server)):
        wait_until(lambda: there() == [2], what="the replacement")
        assert (gt.zeros(3) + torch.ones(3)).sum().item() == 3
        gt.shutdown()
