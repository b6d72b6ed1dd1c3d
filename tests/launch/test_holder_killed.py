"""A holder of a sharded tensor is killed while the client reads it."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

import gt
from gt.client import active_session
from tests.subprocesses import wait_until


@pytest.mark.parametrize("killed", [0, 1])
def test_a_holder_that_is_killed_during_a_read_fails_it_once(killed):
    gt.init(workers=2)
    try:
        value = torch.randn(600, 600)  # in shared memory
        kept = [
            gt.distribute(value, gt.mesh(2, ("x",)), "x, -"),
            gt.distribute(value, gt.mesh(1, workers=[1 - killed]), [gt.Replicate()]),
        ]
        gt.synchronize()
        process = psutil.Process(active_session.current().welcome.workers[killed].pid)
        process.suspend()
        with ThreadPoolExecutor() as pool:
            read = pool.submit(kept[0].cpu)
            state = active_session.current().channel._server.dispatcher.state
            wait_until(lambda: [pending.waiting_for for pending in state.pending.values()] == [{killed}])
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(gt.WorkerLost, match=f"worker {killed}"):
                read.result(timeout=60)
        with pytest.raises(gt.WorkerLost):
            kept[0].cpu()
        assert torch.equal(kept[1].cpu(), value)
        assert torch.equal(gt.to(value).cpu(), value)
        assert state.pending == {}
    finally:
        gt.shutdown()
    assert not [*Path("/dev/shm").glob(f"gt-{os.getpid()}-*")]
