"""The scopes that each thread or task has entered, and the scopes of autograd nodes."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import gt
from gt import SignalConfig
from tests.signals.recorded_scopes import ALL, configure, layout_and_workers, scopes_of

pytestmark = pytest.mark.usefixtures("no_signals")


def test_scopes_nest_and_the_innermost_configured_one_counts(four_workers):
    configure("outer", 0, [0, 1])
    configure("inner", 1, [2, 3])
    gt.register_config("silent", SignalConfig())
    with gt.signal.context("outer"):
        assert layout_and_workers(gt.zeros(4, 4)) == "w, - on 0 1"
        with gt.signal.context("unknown"), gt.signal.context("silent"):
            assert layout_and_workers(gt.zeros(4, 4)) == "w, - on 0 1"
            with gt.signal.context("inner"):
                assert layout_and_workers(gt.zeros(4, 4)) == "-, w on 2 3"
        assert layout_and_workers(gt.zeros(4, 4)) == "w, - on 0 1"
    assert gt.zeros(3, 4).spec.mesh.size == 1


def test_threads_and_tasks_keep_their_scopes_apart(four_workers):
    for worker in ALL:
        configure(f"on {worker}", 0, [worker])
    found = {}
    barrier = threading.Barrier(4)

    def work(worker):
        with gt.signal.context(f"on {worker}"):
            barrier.wait()
            for _ in range(20):
                x = gt.ones(3, 3)
            found[worker] = x.spec.mesh.workers

    threads = [threading.Thread(target=work, args=(worker,)) for worker in ALL]
    with gt.signal.context("on 0"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {worker: (worker,) for worker in ALL}

    async def task(worker):
        with gt.signal.context(f"on {worker}"):
            for _ in range(3):
                await asyncio.sleep(0)
                assert gt.ones(2, 2).spec.mesh.workers == (worker,)

    async def main():
        await asyncio.gather(*map(task, ALL))

    asyncio.run(main())


def test_autograd_nodes_of_another_thread_do_not_matter(four_workers):
    configure("other", 0, [1])
    x = gt.tensor(torch.randn(4, 4)).requires_grad_()
    with gt.signal.context("unknown"):
        y = x
        for _ in range(20):
            y = y.sin()

    def make_as_many():
        z = x
        with gt.signal.context("other"):
            for _ in range(40):
                z = z.cos()

    thread = threading.Thread(target=make_as_many)
    thread.start()
    thread.join()
    assert {scope for _, scope in scopes_of(y.sum().backward)[1]} == {"-"}


def test_marks_do_not_grow_without_end(four_workers, monkeypatch):
    monkeypatch.setattr("gt.client.scope_stack._MAX_MARKS", 16)
    configure("one", 0, [0, 1], backward="back")
    configure("back", 0, [2])
    x = gt.tensor(torch.ones(2)).requires_grad_()
    for _ in range(40):
        with gt.signal.context("one"):
            y = x.sin()
        z = y * 2
        _, ops = scopes_of(z.sum().backward)
        assert ("cos", "back") in ops
