"""A program is read only while somebody looks, and as often as the cost allows."""

import asyncio
import time
from collections import Counter

import msgspec
import pytest

from gt.core.program_view import FailuresState, MemoryState, ProgramStatus, WorkerState
from gt.web_dashboard import watcher as watching
from gt.web_dashboard.page_records import Status
from gt.web_dashboard.watcher import ProgramWatcher

WORKER = WorkerState(0, "here", 8, "cpu", 0, "idle")


class CountedView:
    """A program whose reads are counted; each look at its workers computes for `seconds`."""

    def __init__(self, seconds=0.0):
        self.reads = Counter()
        self.watched = []
        self.seconds = seconds

    def read_workers(self):
        self.reads["workers"] += 1
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return (WORKER,)

    def read_status(self):
        return ProgramStatus(time.monotonic_ns(), 7, (WORKER,), ())

    def read_memory(self):
        return MemoryState(0, 0, 0, (), (), 0)

    def read_traffic(self):
        return ()

    def read_failures(self):
        return FailuresState(0, (), ())

    def watch_lines(self, on):
        self.watched.append(on)


def run_for(view, seconds, look):
    async def run():
        program = ProgramWatcher(view)
        task = asyncio.create_task(program.run())
        if look:
            program.look()
        await asyncio.sleep(seconds)
        task.cancel()
        return program

    return asyncio.run(run())


def test_nothing_is_read_while_nobody_looks():
    view = CountedView()
    run_for(view, 0.2, look=False)
    assert not view.reads and not view.watched


def test_reading_goes_on_for_a_moment_after_a_look(monkeypatch):
    monkeypatch.setattr(watching, "LINGER_SECONDS", 0.2)
    view = CountedView()
    run_for(view, 0.6, look=True)
    assert 1 < view.reads["workers"] <= 20
    assert view.watched == [True, False]


def test_looks_that_take_long_are_rare():
    view = CountedView(seconds=0.02)
    run_for(view, 0.5, look=True)
    assert view.reads["workers"] == 1  # the next one is due a second later


@pytest.mark.timeout(20)
def test_records_are_published_as_json_with_a_version():
    published = run_for(CountedView(), 0.05, look=True).published
    version, data = published["status"]
    assert version == 1
    assert msgspec.json.decode(data, type=Status).workers[0].worker == 0
    assert {*published} == {"status", "sessions", "memory", "tensors", "traffic", "failures"}
