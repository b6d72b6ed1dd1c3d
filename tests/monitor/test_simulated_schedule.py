"""Schedules of recorded commands: durations, order and exchanges decide the times."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.message_events import TimelineEvent, Transfer
from gt.monitor.simulated_schedule import schedule


class Tape:
    """Events as virtual workers record them: one after the other."""

    def __init__(self):
        self.now = 1000
        self.events = []

    def op(self, worker, length):
        self.events.append(TimelineEvent(worker, "op", "", "", self.now, self.now + length))
        self.now += length

    def move(self, source, target, before=0, after=0):
        """Both sides of a move begin together; each works before its send and after its receive."""
        start, sent = self.now, self.now + before
        got = sent + 5  # in which other virtual workers ran
        sends, receives = Transfer(sent, sent, ((target, 8),), ()), Transfer(start, got, (), ((source, 8),))
        self.events.append(TimelineEvent(source, "send", "", "", start, sent, (sends,)))
        self.events.append(TimelineEvent(target, "receive", "", "", start, got + after, (receives,)))
        self.now = got + after

    def schedule(self, **options):
        return schedule(self.events, **options)


def times(tape, **options):
    """`worker op start-end` in the order of their ends."""
    return [f"{e.worker} {e.op} {e.start}-{e.end}" for e in tape.schedule(**options).events]


def test_an_empty_schedule_takes_no_time():
    assert (schedule([]).makespan, schedule([]).idle(0)) == (0, 0)


def test_workers_that_never_meet_run_at_once():
    tape = Tape()
    tape.op(0, 30)
    tape.op(1, 20)
    tape.op(0, 5)
    assert times(tape) == ["1 op 0-20", "0 op 0-30", "0 op 30-35"]
    found = tape.schedule()
    assert (found.makespan, found.busy(1), found.idle(0), found.idle(1)) == (35, 20, 0, 15)


def test_a_receiver_waits_for_its_sender():
    tape = Tape()
    tape.op(0, 30)
    tape.op(1, 10)
    tape.move(0, 1, before=2, after=3)
    tape.op(1, 10)
    assert times(tape) == ["1 op 0-10", "0 op 0-30", "0 send 30-32", "1 receive 10-35", "1 op 35-45"]
    assert tape.schedule().idle(1) == 22


def test_a_sender_does_not_wait_for_its_receiver():
    tape = Tape()
    tape.op(1, 100)
    tape.move(0, 1)
    tape.op(0, 30)
    assert times(tape) == ["0 send 0-0", "0 op 0-30", "1 op 0-100", "1 receive 100-100"]


def test_sends_are_received_in_order():
    tape = Tape()
    for length in (10, 20):
        tape.op(0, length)
        tape.move(0, 1)
        tape.op(1, 1)
    assert times(tape)[-3:] == ["0 send 30-30", "1 receive 11-30", "1 op 30-31"]


def test_both_sides_of_a_swap_wait_for_the_later_one():
    tape = Tape()
    tape.op(0, 30)
    tape.op(1, 10)
    for worker in (0, 1):
        transfer = Transfer(2000, 2007, ((1 - worker, 8),), ((1 - worker, 8),))
        tape.events.append(TimelineEvent(worker, "swap", "", "", 1999, 2008, (transfer,)))
    assert [(event.worker, event.start, event.end) for event in tape.schedule().events[-2:]] == [
        (0, 30, 32),
        (1, 10, 32),
    ]


def test_a_send_before_the_recording_counts_as_arrived():
    tape = Tape()
    tape.move(0, 1, after=3)
    tape.op(1, 10)
    received = [event for event in tape.events if event.worker == 1]
    assert schedule(received).makespan == 13


def test_a_cost_replaces_the_recorded_duration():
    tape = Tape()
    tape.op(0, 30)
    tape.move(0, 1, before=2, after=3)
    costs = {"op": 10, "send": 4, "receive": 9}
    assert times(tape, cost=lambda event: costs[event.op]) == ["0 op 0-10", "0 send 10-14", "1 receive 0-23"]


def pipeline(stages, batches, lengths=(10, 20)):
    """GPipe: all micro-batches forward, then all backward."""
    tape = Tape()
    forward, backward = lengths
    for _ in range(batches):
        for stage in range(stages):
            if stage:
                tape.move(stage - 1, stage)
            tape.op(stage, forward)
    for _ in range(batches):
        for stage in reversed(range(stages)):
            if stage < stages - 1:
                tape.move(stage + 1, stage)
            tape.op(stage, backward)
    return tape


@pytest.mark.parametrize(("stages", "batches"), [(1, 3), (2, 8), (4, 8), (4, 1), (8, 32)])
def test_equal_stages_idle_as_long_as_gpipe_says(stages, batches):
    found = pipeline(stages, batches).schedule()
    assert found.makespan == (batches + stages - 1) * 30
    for worker in range(stages):
        assert found.idle(worker) * (batches + stages - 1) == found.makespan * (stages - 1)


STEPS = st.one_of(
    st.tuples(st.just("op"), st.integers(0, 3), st.integers(0, 50)),
    st.tuples(st.just("move"), st.permutations(range(4)).map(lambda p: p[:2]), st.integers(0, 9), st.integers(0, 9)),
)


@given(st.lists(STEPS, max_size=40))
def test_a_schedule_keeps_the_recorded_events(steps):
    tape = Tape()
    for kind, where, *lengths in steps:
        tape.op(where, *lengths) if kind == "op" else tape.move(*where, *lengths)
    found = tape.schedule()
    assert len(found.events) == len(tape.events)
    assert found.makespan <= sum(event.busy for event in tape.events)  # at worst one after the other
    for worker in {event.worker for event in tape.events}:
        mine = [event for event in tape.events if event.worker == worker]
        ours = sorted([event for event in found.events if event.worker == worker], key=lambda e: (e.start, e.end))
        assert found.busy(worker) == sum(event.busy for event in mine) <= found.makespan
        assert [event.busy for event in ours if event.busy] == [event.busy for event in mine if event.busy]
        assert all(first.end <= second.start for first, second in pairwise(ours))
