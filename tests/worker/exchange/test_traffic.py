"""Bytes received are those of the plan, by sender."""

from gt.worker.exchange import traffic
from gt.worker.exchange.traffic import TrafficCount
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import dense, step_of

GATHER = step_of(0, dense((6,)), over("x"), over("-"))
REDUCE = step_of(0, dense((5,)), over("- + x"), over("-"))
SEND = step_of(0, dense((4,)), at(0), at(1))


def test_bytes_are_counted_by_sender():
    count = TrafficCount()
    count.add([GATHER, REDUCE])
    count.add([GATHER, SEND])
    assert count.by_peer() == {1: 2 * 12 + 20}
    assert count.by_peer() == {1: 2 * 12 + 20}


def test_parts_are_not_kept(monkeypatch):
    monkeypatch.setattr(traffic, "_MAX_STEPS", 3)
    count = TrafficCount()
    for _ in range(10):
        count.add([step_of(0, dense((6,)), over("x"), over("-"))])
        assert len(count._runs) <= 3
    assert count.by_peer() == {1: 120}
