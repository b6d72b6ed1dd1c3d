"""A worker that is told to end by SIGTERM does so at once, also while it waits for a message."""

import contextlib
import os
import signal

import psutil
import pytest

from gt.core.messages import Leaving, Report, Synchronize, Welcome, WorkerShutdown
from gt.version import __version__
from gt.wire.codec import Decoder, encode
from gt.wire.connections import Router
from gt.wire.process_identity import this_host
from tests.subprocesses import finish, running, start, wait_until

# It waits longer for a message than it may take to end. Exit code 1 would tell that it had to be ended.
PATIENT_WORKER = """
import sys
from gt.worker import process
from gt.worker.__main__ import main
process.POLL_MS = 600_000
sys.exit(main(["--connect", sys.argv[1], "--threads", "1"]))
"""


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_worker_that_waits_for_a_message_ends_at_sigterm(tmp_path, has_joined):
    endpoint = f"ipc://{tmp_path}/server"
    with contextlib.closing(Router(endpoint, None, 20_000, 0)) as router:
        worker = start("-c", PATIENT_WORKER, endpoint)
        with running(worker):
            name, _ = router.receive()
            if has_joined:
                router.send(name, encode([Welcome(__version__, 0, os.getpid(), this_host())]))
                router.send(name, encode([Synchronize(1)]))
                router.receive()
            wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_SLEEPING)
            worker.send_signal(signal.SIGTERM)
            if has_joined:
                _, frames = router.receive()
                assert Decoder(Report).decode(frames)[0] == [Leaving()]
                router.send(name, encode([WorkerShutdown()]))
            code, _, err = finish(worker)
    assert code == 0, err
