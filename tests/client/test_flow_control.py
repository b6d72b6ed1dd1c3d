"""A client waits for its workers when it is too many instructions ahead, and not before."""

import itertools

import pytest

from gt.client.flow_control import INTERVAL, MAX_MARKS, FlowControl


@pytest.fixture
def waited():
    return []


@pytest.fixture
def flow(waited):
    """Marks have the ids 0, 1, 2, ..."""
    return FlowControl(itertools.count().__next__, waited.append)


def test_a_client_that_is_a_little_ahead_does_not_wait(flow, waited):
    for _ in range(MAX_MARKS):
        flow.count(INTERVAL)
    assert waited == []


def test_each_further_mark_waits_for_the_oldest(flow, waited):
    for _ in range(MAX_MARKS + 3):
        flow.count(INTERVAL)
    assert waited == [0, 1, 2]


def test_instructions_are_counted_over_batches(flow, waited):
    for _ in range(2 * (MAX_MARKS + 1)):
        flow.count(INTERVAL // 2)
    assert waited == [0]


def test_a_mark_that_is_counted_itself_makes_no_other_mark(waited):
    """Sending a mark flushes, which counts the mark."""
    marks = itertools.count()

    def send_mark():
        flow.count(1)
        return next(marks)

    flow = FlowControl(send_mark, waited.append)
    flow.count(INTERVAL)
    assert next(marks) == 1


def test_a_wait_that_fails_does_not_stop_the_next_ones(waited):
    def wait(mark):
        waited.append(mark)
        if mark == 0:
            raise TimeoutError

    flow = FlowControl(itertools.count().__next__, wait)
    for _ in range(MAX_MARKS):
        flow.count(INTERVAL)
    with pytest.raises(TimeoutError):
        flow.count(INTERVAL)
    flow.count(INTERVAL)
    assert waited == [0, 1]
