"""Timelines of workers: recorded while a session asks for them, read in portions, and bounded."""

import itertools
import time

import pytest
import torch

import gt
from gt.client import active_session
from gt.core.messages import (
    RAN_AT_ONCE,
    FreeTensors,
    Lost,
    Ran,
    ReadTimeline,
    RunOp,
    TimelineRead,
    TimelineReport,
    WorkerTimeline,
)
from gt.core.meta import TensorMeta
from gt.dispatcher.message_queue import ToClient, ToWorkers
from gt.sharding.reshard import plan_reshard
from gt.worker.exchange.local_steps import LocalStep
from gt.worker.op_descriptions import OpDescription
from gt.worker.timeline_recorder import TimedCommand, TimelineRecorder
from tests.dispatcher_harness import REQUEST, REQUEST2, answers, harness_with, over
from tests.records import RAN, own


def ops(t):
    return [event.op for event in t.events if event.op.startswith("aten")]


# --- The client's block -----------------------------------------------------------------------------------------------


def test_only_commands_inside_the_block_are_recorded(anywhere):
    x = gt.ones(3, 5).exp()
    with gt.debug.timeline() as t:
        y = x.sin()
        y.sum().item()
    x.cos().sum().item()
    assert set(ops(t)) >= {"aten.sin.default", "aten.sum.default"}
    assert not {"aten.exp.default", "aten.cos.default"} & set(ops(t))
    assert "fetch" in [event.op for event in t.events]
    assert t.dropped == 0


def test_an_event_says_where_when_and_for_which_line():
    gt.init(workers=2, mode="virtual")
    try:
        gt.register_config("second", gt.SignalConfig(shard=gt.ShardConfig(axis=0, workers=[1])))
        before = time.monotonic_ns()
        with gt.debug.timeline() as t, gt.signal.context("second"):
            gt.zeros(3, 5)
        (event,) = [event for event in t.events if event.op.startswith("aten")]
        assert (event.worker, event.op, event.scope) == (1, "aten.zeros.default", "second")
        assert "test_timeline_recorder.py:" in event.line
        assert before < event.start < event.end < time.monotonic_ns()
        assert event.waited == 0 and event.busy == event.end - event.start
    finally:
        gt.shutdown()


@pytest.mark.parametrize("mode", [{"mode": "virtual"}, {}], ids=["virtual", "processes"])
def test_an_exchange_is_recorded_on_both_sides(mode):
    gt.init(workers=2, **mode)
    try:
        halves = gt.distribute(torch.ones(4, 6), gt.mesh(2, ("x",)), "x, -")
        with gt.debug.timeline() as t:
            halves.redistribute(placements="-, -")
        moves = [event for event in t.events if event.op == "redistribute"]
        assert sorted(event.worker for event in moves) == [0, 1]
        for event in moves:
            (transfer,) = event.transfers
            peer = 1 - event.worker
            assert (transfer.sends, transfer.receives) == (((peer, 48),), ((peer, 48),))
            assert event.start <= transfer.start <= transfer.end <= event.end
            assert event.busy + event.waited == event.end - event.start
    finally:
        gt.shutdown()


def test_busy_and_idle_make_the_span(anywhere):
    with gt.debug.timeline() as t:
        (gt.ones(64, 64) @ gt.ones(64, 64)).sum().item()
    assert t.span == max(event.end for event in t.events) - min(event.start for event in t.events)
    for worker in t.workers:
        assert 0 < t.busy(worker) <= t.span
        assert t.busy(worker) + t.idle(worker) == t.span


def test_a_block_without_work_is_empty(embedded):
    with gt.debug.timeline() as t:
        pass
    assert (t.events, t.workers, t.span, t.dropped) == ([], [], 0, 0)


def test_events_over_the_limit_are_counted(embedded):
    x = gt.ones(3)
    with gt.debug.timeline(limit=10) as t:
        for _ in range(30):
            x = x + 1
    assert len(t.events) == 10
    assert t.dropped >= 20


def test_long_timelines_come_in_portions(embedded):
    count = 2 * RAN_AT_ONCE + 10
    x = gt.ones(3)
    with gt.debug.timeline() as t:
        for _ in range(count):
            x = x + 1
    assert ops(t).count("aten.add.Tensor") == count
    starts = [event.start for event in t.events]
    assert starts == sorted(starts)


@pytest.mark.parametrize("limit", [0, -1, (1 << 20) + 1])
def test_an_invalid_limit_is_refused(limit):
    with pytest.raises(ValueError, match="is not possible: 1 to 1048576 are"):
        gt.debug.timeline(limit)


def test_timelines_nest(embedded):
    with gt.debug.timeline(limit=10) as outer:
        x = gt.ones(3)
        with gt.debug.timeline() as inner:
            x = x.exp()
            for _ in range(20):
                x = x.sin()
        x.cos()
    assert ops(inner) == ["aten.exp.default", *["aten.sin.default"] * 20]
    assert ops(outer) == ["aten.ones.default", "aten.exp.default", *["aten.sin.default"] * 8][: len(ops(outer))]
    assert (len(outer.events), inner.dropped) == (10, 0) and outer.dropped >= 12


def test_events_of_one_block_are_not_in_the_next(embedded):
    session = active_session.current()
    session.ask(lambda request: ReadTimeline(request, 1000), TimelineRead)
    gt.ones(3).exp()
    with gt.debug.timeline() as t:
        gt.ones(3).sin()
    assert ops(t) == ["aten.ones.default", "aten.sin.default"]


def test_a_query_and_a_failing_op_are_recorded(embedded):
    with gt.debug.timeline() as t:
        gt.tensor([0.0, 1.0]).nonzero()
        bad = gt.arange(3.0)[gt.tensor([7])]
    assert {"upload", "aten.nonzero.default", "aten.index.Tensor"} <= {event.op for event in t.events}
    with pytest.raises(gt.OpError):
        bad.tolist()


# --- The dispatcher ---------------------------------------------------------------------------------------------------


def test_every_worker_is_asked_and_the_client_gets_one_answer():
    harness = harness_with(2)
    assert harness.tell(ReadTimeline(REQUEST, 7)) == [ToWorkers((0, 1), ReadTimeline(REQUEST, 7))]
    assert harness.report(1, TimelineReport(REQUEST, (RAN,), 3)) == []
    told = (WorkerTimeline(1, (RAN,), 3), WorkerTimeline(0, (), 0))
    assert harness.report(0, TimelineReport(REQUEST, (), 0)) == [ToClient(1, TimelineRead(REQUEST, told))]


def test_a_timeline_cannot_be_read_from_a_lost_worker():
    harness = harness_with(2)
    harness.tell(ReadTimeline(REQUEST, 7))
    assert answers(harness.lose(1))[0] == Lost(REQUEST, 1, 1001, "was killed", "aten.mm")
    assert harness.report(0, TimelineReport(REQUEST, (), 0)) == []


def test_a_timeline_cannot_be_read_without_workers():
    harness = harness_with(1)
    harness.lose(0)
    (answer,) = answers(harness.tell(ReadTimeline(REQUEST2, 7)))
    assert answer.request == REQUEST2 and not isinstance(answer, TimelineRead)


# --- The worker -------------------------------------------------------------------------------------------------------

OP = RunOp(own(1), (), (own(5),), (), 2, 3)
FOREIGN = RunOp(own(1, 2), (), (), (), 0, 3)


@pytest.fixture
def recorder():
    """Its clock shows 10, 20, 30, ..."""
    ticks = itertools.count(10, 10)
    return TimelineRecorder(Definitions(), lambda: next(ticks))


class Definitions:
    def describe_op(self, op_id):
        return OpDescription("aten.x.default", 1)

    def describe_scope(self, session, scope):
        return "forward"


def run(recorder, command, step=None):
    for _ in recorder.timed([command]):
        if step is not None:
            recorder.note_exchange(command, [step], recorder.clock())


def test_a_recorder_is_on_while_a_session_records(recorder):
    states = [recorder.is_on]
    for limit in (5, 0):
        recorder.take(1, limit)
        states.append(recorder.is_on)
    assert states == [False, True, False]


def test_a_command_is_recorded_with_its_op_scope_and_line(recorder):
    recorder.take(1, 5)
    run(recorder, OP)
    run(recorder, FreeTensors((own(5),)))
    told = (
        Ran("aten.x.default", 3, "forward", 10, 20, (), 1, (), (own(5),), 1),
        Ran("free", 0, "", 30, 40, (), 1, (own(5),)),
    )
    assert recorder.take(1, 0) == (told, 0, ())


def test_commands_of_other_sessions_are_not_reported(recorder):
    recorder.take(1, 5)
    meta = TensorMeta((2,), (1,), 0, "float32")
    (step,) = plan_reshard((2,), 4, over("- + x"), over("-")).steps
    run(recorder, FOREIGN, LocalStep(0, meta, step, nbytes=16))
    run(recorder, OP)
    (told,), dropped, _ = recorder.take(1, 0)
    assert (told.op, told.swaps, dropped) == ("aten.x.default", (), 0)


def test_the_oldest_events_are_kept_and_reported_first(recorder):
    recorder.take(1, RAN_AT_ONCE + 1)
    for _ in range(RAN_AT_ONCE + 3):
        run(recorder, OP)
    first, dropped, _ = recorder.take(1, 0)
    rest, none, _ = recorder.take(1, 0)
    assert (len(first), len(rest), dropped, none) == (RAN_AT_ONCE, 1, 2, 0)
    assert first[0].start == 10 < rest[0].start
    assert recorder.take(1, 0) == ((), 0, ())


def test_an_ended_session_is_forgotten(recorder):
    recorder.take(1, 5)
    run(recorder, OP)
    recorder.forget(1)
    assert not recorder.is_on
    assert recorder.take(1, 0) == ((), 0, ())


def test_the_end_of_a_command_is_the_begin_of_the_next(recorder):
    recorder.take(1, 5)
    for _ in recorder.timed([OP, OP, OP]):
        pass
    assert [(ran.start, ran.end) for ran in recorder.take(1, 0)[0]] == [(10, 20), (20, 30), (30, 40)]


def test_the_time_of_a_listener_is_that_of_no_command(recorder):
    seen = []
    recorder.listen(lambda timed: seen.append((timed.start, timed.end, recorder.clock())))
    for _ in recorder.timed([OP, OP]):
        pass
    assert seen == [(10, 20, 30), (40, 50, 60)]


def test_an_exchange_that_ends_between_commands_is_told_by_itself(recorder):
    """Bytes that no command has waited for count too."""
    recorder.take(1, 5)
    run(recorder, OP)
    meta = TensorMeta((2,), (1,), 0, "float32")
    (step,) = plan_reshard((2,), 4, over("- + x"), over("-")).steps
    recorder.note_exchange(OP, [LocalStep(0, meta, step, nbytes=16)], recorder.clock())
    run(recorder, OP)
    first, alone, last = recorder.take(1, 0)[0]
    assert (first.swaps, alone.op, len(alone.swaps), last.swaps) == ((), "exchange", 1, ())
    assert first.end < alone.start < alone.end < last.start


def test_steps_of_a_segment_that_have_ended_have_times(recorder):
    """The last step has raised."""
    steps = [("call", 4), ("call", 5), ("call", 6)]
    iterated = recorder.timed_steps(steps)
    for _ in steps:
        next(iterated)
    recorder.note_code(range(7, 9), recorder.clock())
    timed = TimedCommand(OP, 0, 100, (), recorder._steps)
    found = [(10, 20, range(4, 5)), (20, 30, range(5, 6)), (40, 50, range(7, 9))]
    assert [(start, end, positions) for positions, start, end in timed.op_times] == found
