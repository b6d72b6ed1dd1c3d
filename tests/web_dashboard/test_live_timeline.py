"""Spans of time from looks at workers."""

from gt.core.program_view import WorkerState
from gt.web_dashboard.live_timeline import MAX_SPANS, WINDOW, LiveTimeline, Span


def worker(state="running", op="aten.mm.default", since=0, number=0, waits_for=()):
    return WorkerState(number, "here", 1, "cpu", 0, state, op, "a.py:1", waits_for, since)


def test_looks_at_the_same_op_are_one_span():
    timeline = LiveTimeline()
    for time in (100, 200, 300):
        timeline.add(time, [worker()])
    assert timeline.part_after(0).current == (Span(0, 100, 300, "contraction", "aten.mm.default", "a.py:1"),)


def test_a_state_begins_when_the_worker_says_so():
    timeline = LiveTimeline()
    timeline.add(100, [worker()])
    timeline.add(200, [worker("idle", since=130)])
    part = timeline.part_after(0)
    assert [(span.kind, span.start, span.end) for span in (*part.ended, *part.current)] == [
        ("contraction", 100, 130),
        ("idle", 130, 200),
    ]


def test_a_worker_that_waits_for_others_does_not_exchange():
    timeline = LiveTimeline()
    timeline.add(100, [worker("exchanging"), worker("exchanging", number=1, waits_for=(0,))])
    assert [span.kind for span in timeline.part_after(0).current] == ["exchange", "wait"]


def test_a_viewer_gets_each_span_once():
    timeline = LiveTimeline()
    timeline.add(100, [worker(op="aten.mm.default")])
    timeline.add(200, [worker(op="aten.relu.default")])
    first = timeline.part_after(0)
    timeline.add(300, [worker(op="aten.mm.default")])
    assert [span.op for span in first.ended] == ["aten.mm.default"]
    assert [span.op for span in timeline.part_after(first.number).ended] == ["aten.relu.default"]


def test_the_span_of_a_worker_that_has_gone_ends():
    timeline = LiveTimeline()
    timeline.add(100, [worker()])
    timeline.add(200, [])
    part = timeline.part_after(0)
    assert (len(part.ended), part.current) == (1, ())


def test_old_spans_are_forgotten_and_their_number_is_bounded():
    timeline = LiveTimeline()
    for time in range(MAX_SPANS + 10):
        timeline.add(time + 1, [worker(op=f"aten.op{time % 2}.default")])
    assert len(timeline.part_after(0).ended) == MAX_SPANS
    timeline.add(WINDOW * 3, [worker()])
    assert len(timeline.part_after(0).ended) <= 1
