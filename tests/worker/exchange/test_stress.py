"""Random exchanges of four processes in groups that overlap, with delays and little memory: no value is wrong."""

import contextlib
import select

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
        all_done = are_all_done(members)
        for member in members:
            member.kill()  # one that has failed has ended
        errors = [member.communicate(timeout=60)[1] for member in members]
    assert all_done, f"seed {seed}: " + "\n".join(errors)


def are_all_done(members):
    """Wait until all members are done, or one has ended before: the others would wait for it."""
    waiting = [member.stdout for member in members]
    while waiting:
        ready, _, _ = select.select(waiting, [], [])
        if any(output.readline() != "done\n" for output in ready):
            return False
        waiting = [output for output in waiting if output not in ready]
    return True


@pytest.mark.parametrize("transport", ["shared"])
def test_random_exchanges_of_processes(transport):
    run_members(transport, seed=1, count=300)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_random_exchanges_of_processes(transport, seed):
    run_members(transport, seed, count=3000)


def test_a_member_that_cannot_start_ends_the_test_at_once():
    waiting = start("-c", "import signal; signal.pause()")
    failing = start("-c", "import gt.worker.exchange.no_such_module")
    with running(waiting, failing):
        assert not are_all_done([waiting, failing])
