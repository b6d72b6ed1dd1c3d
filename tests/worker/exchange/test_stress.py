"""Random exchanges of four processes in groups that overlap, with delays and little memory: no value is wrong."""

import contextlib

import pytest

from gt.worker.exchange import ProcessExchange
from tests.subprocesses import running, start
from tests.worker.exchange.transports import left

WORKERS = 4


def run_members(transport, seed, count):
    with contextlib.ExitStack() as stack:
        store = ProcessExchange(WORKERS, "cpu")
        stack.enter_context(left([store]))
        port = store.host_store()
        members = []
        for worker in range(WORKERS):
            arguments = [str(each) for each in (worker, WORKERS, seed, count, port, transport)]
            members.append(start("-m", "tests.worker.exchange.stress_member", *arguments))
            stack.enter_context(running(members[-1]))
        said = [member.stdout.readline() for member in members]
        for member in members:
            member.kill()  # one that has failed has ended
        errors = [member.communicate(timeout=60)[1] for member in members]
    assert said == ["done\n"] * WORKERS, f"seed {seed}: " + "\n".join(errors)


@pytest.mark.parametrize("transport", ["shared"])
def test_random_exchanges_of_processes(transport):
    run_members(transport, seed=1, count=300)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_random_exchanges_of_processes(transport, seed):
    run_members(transport, seed, count=3000)
