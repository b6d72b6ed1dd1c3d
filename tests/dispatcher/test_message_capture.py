"""Captures: messages are noted as they are and described later; workers are asked for their commands."""

import pytest

from gt.core.errors import ProtocolError, SessionError
from gt.core.message_events import BatchPlanned, Event, WorkerRan, WorkerSampled
from gt.core.messages import (
    RAN_AT_ONCE,
    DefineOp,
    DefineSite,
    FetchTensor,
    Ran,
    ReadTimeline,
    RunOp,
    TimelineReport,
)
from gt.dispatcher.message_capture import MessageCapture
from gt.dispatcher.message_queue import ToWorkers
from tests.dispatcher_harness import OP, REQUEST, A, B, C, create, harness_with
from tests.records import ADD, own


def captured(harness, limit=100):
    capture = MessageCapture(limit)
    return capture, harness.dispatcher.begin_capture(capture)


def add(harness):
    harness.tell(DefineSite(1, "train.py", 12, "step"), create(A), create(B), DefineOp(OP, ADD))
    harness.tell(RunOp(OP, (A, B), (C,), (), 0, 1), FetchTensor(REQUEST, C, site=1))


def test_messages_are_described_with_their_ops_and_lines():
    harness = harness_with(1)
    capture, asked = captured(harness)
    assert asked == [ToWorkers((0,), ReadTimeline(1, 100))]
    add(harness)
    harness.dispatcher.end_capture()
    events = list(capture.events())
    messages = [event for event in events if isinstance(event, Event)]
    assert [(event.direction, event.op, event.site) for event in messages if isinstance(event.message, RunOp)] == [
        ("RECV", "aten.add.Tensor", "train.py:12"),
        ("WORKER_SEND", "aten.add.Tensor", "train.py:12"),
    ]
    assert sum(batch.instructions for batch in events if isinstance(batch, BatchPlanned)) == 6
    times = [event.time for event in messages]
    assert times == sorted(times) and times[0] > 0


def test_messages_after_the_end_and_over_the_limit_are_not_kept():
    harness = harness_with(1)
    capture, _ = captured(harness, limit=2)
    add(harness)
    harness.dispatcher.end_capture()
    before = len(list(capture.events()))
    harness.tell(FetchTensor(own(300), C))
    assert len(list(capture.events())) == before and capture.dropped > 0


def test_workers_are_asked_until_all_their_commands_are_there():
    harness = harness_with(2)
    capture, _ = captured(harness)
    harness.report(0, TimelineReport(1, (), 0))
    harness.tell(DefineSite(1, "train.py", 12, "step"))
    assert harness.dispatcher.end_capture() == [ToWorkers((0, 1), ReadTimeline(2, 0))]
    ran = Ran("aten.add.Tensor", 1, "forward", 10, 20, (), 1, (A, B), (C,))
    assert harness.report(0, TimelineReport(2, (ran,) * RAN_AT_ONCE, 0)) == [ToWorkers((0,), ReadTimeline(2, 0))]
    harness.report(0, TimelineReport(2, (ran,), 3, ((5, 64),)))
    assert harness.dispatcher.captures.missing() == {1}
    harness.report(1, TimelineReport(1, (), 0))  # a busy worker answers the first request late
    assert harness.dispatcher.captures.missing() == {1}
    harness.report(1, TimelineReport(2, (), 0))
    assert harness.dispatcher.captures.missing() == set() and capture.dropped == 3
    found = [event for event in capture.events() if isinstance(event, WorkerRan)]
    assert len(found) == RAN_AT_ONCE + 1 and {event.site for event in found} == {"train.py:12"}
    assert [event for event in capture.events() if isinstance(event, WorkerSampled)] == [WorkerSampled(0, 5, 64)]


def test_one_capture_goes_on_at_a_time():
    harness = harness_with(1)
    captured(harness)
    with pytest.raises(SessionError, match="another monitor is capturing"):
        captured(harness)
    harness.dispatcher.end_capture()
    with pytest.raises(SessionError, match="another monitor is capturing"):
        captured(harness)
    harness.dispatcher.captures.release()
    captured(harness)


def test_timelines_that_were_not_asked_for_are_refused():
    harness = harness_with(2)
    for request in (0, 1, 7):
        with pytest.raises(ProtocolError, match="was not asked for a timeline"):
            harness.report(0, TimelineReport(request, (), 0))
    captured(harness)
    harness.report(0, TimelineReport(1, (), 0))
    with pytest.raises(ProtocolError, match="was not asked for a timeline"):
        harness.report(0, TimelineReport(1, (), 0))
    ran = Ran("aten.add.Tensor", 1, "", 10, 20)
    with pytest.raises(ProtocolError, match="over the limit"):
        harness.report(1, TimelineReport(1, (ran,) * (RAN_AT_ONCE + 1), 0))


def test_a_lost_worker_is_not_waited_for():
    harness = harness_with(2)
    captured(harness)
    harness.dispatcher.end_capture()
    harness.lose(1)
    assert harness.dispatcher.captures.missing() == {0}
