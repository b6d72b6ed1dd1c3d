"""Random exchanges of four processes in groups that overlap, with delays and little memory: no value is wrong."""

import contextlib
import os
import subprocess
import sys

import pytest

from gt.worker.exchange import ProcessExchange
from tests.worker.exchange.transports import left

WORKERS = 4


def run_members(transport, seed, count):
    with contextlib.ExitStack() as stack:
        store = ProcessExchange(WORKERS, "cpu")
        stack.enter_context(left([store]))
        port = store.host_store()
        environ = {**os.environ, "PYTHONPATH": os.getcwd()}
        members = []
        for worker in range(WORKERS):
            arguments = [str(each) for each in (worker, WORKERS, seed, count, port, transport)]
            command = [sys.executable, "-m", "tests.worker.exchange.stress_member", *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
            )
            stack.callback(process.kill)
            members.append(process)
        said = [member.stdout.readline() for member in members]
        errors = [member.communicate("\n", timeout=60)[1] for member in members]
    assert said == ["done\n"] * WORKERS, f"seed {seed}: " + "\n".join(errors)


@pytest.mark.parametrize("transport", ["shared"])
def test_random_exchanges_of_processes(transport):
    run_members(transport, seed=1, count=300)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_random_exchanges_of_processes(transport, seed):
    run_members(transport, seed, count=3000)
