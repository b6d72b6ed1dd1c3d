"""A server and its workers keep nothing of sessions that have ended."""

import contextlib
import signal
import time

import pytest
import torch

import gt
from tests.subprocesses import find_port, running, server_keys, start

# The server or a worker; at SIGUSR1 it prints the number of its objects.
COUNTING = """
import gc, runpy, signal, sys
def count(*_):
    gc.collect()
    print(len(gc.get_objects()), flush=True)
signal.signal(signal.SIGUSR1, count)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=False)
"""
WARM_UP, SESSIONS = 8, 24
KEPT = 2  # objects for each session: of messages for people, of which the last ones are kept


def use_everything(number):
    mesh = gt.mesh(2, ("dp",))
    rows = gt.to(torch.ones(8, 6))
    x = rows
    for _ in range(30):  # a segment
        x = (x * 0.5 + 1.0).relu()
    a = gt.distribute(rows, mesh, gt.Shard(0))
    assert (a @ x.t()).softmax(-1).sum().isfinite().item()
    a.redistribute(placements="-, dp").cpu()
    a.nonzero()
    model = gt.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    @gt.compile
    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert [step(rows) for _ in range(5)][-1].isfinite().item()
    gt.publish(f"rows {number}", rows)
    with gt.debug.comm(), pytest.raises(gt.OpError):
        gt.arange(3.0)[gt.tensor([7])].sum().item()


def run_sessions(port, first, count):
    for number in range(first, first + count):
        gt.connect(f"localhost:{port}", min_workers=2)
        try:
            use_everything(number)
        finally:
            gt.shutdown()


def count_objects(processes):
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    return [int(process.stdout.readline()) for process in processes]


def test_nothing_is_kept_of_many_sessions():
    server = start("-c", COUNTING, "gt.server", "-p", "0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(server))
        port = str(find_port(server, server_keys()))
        workers = [start("-c", COUNTING, "gt.worker", "-p", port, "--threads", "1") for _ in range(2)]
        stack.enter_context(running(*workers))
        run_sessions(port, 0, WARM_UP)
        before = count_objects((server, *workers))
        run_sessions(port, WARM_UP, SESSIONS)
        deadline = time.monotonic() + 60
        while (kept := growth(before, count_objects((server, *workers)))) > KEPT * SESSIONS:
            assert time.monotonic() < deadline, kept  # the last session may still be about to end on a worker
            time.sleep(0.2)


def growth(before, after):
    return max(later - earlier for earlier, later in zip(before, after, strict=True))
