"""The time of a step with exchanges that go on while workers compute."""

import pytest

from gt.sharding.solver.step_timeline import StepTimeline

A, B, C = 1, 2, 3


def test_an_exchange_that_the_worker_does_itself_takes_its_whole_time():
    timeline = StepTimeline(overlap=1.0)
    timeline.compute(1.0)
    timeline.exchange(2.0)
    timeline.compute(1.0)
    assert (timeline.compute_seconds, timeline.waits) == (2.0, [2.0])


@pytest.mark.parametrize(("computed", "wait"), [(0.0, 2.0), (0.5, 1.5), (2.0, 0.0), (5.0, 0.0)])
def test_a_worker_waits_for_what_is_left_of_an_exchange_when_its_result_is_needed(computed, wait):
    timeline = StepTimeline(overlap=1.0)
    timeline.begin(2.0, [A])
    timeline.compute(computed)
    timeline.need([B])
    assert timeline.waits == [0.0]
    timeline.need([A])
    assert timeline.waits == [wait]


def test_the_link_does_one_exchange_after_the_other():
    timeline = StepTimeline(overlap=1.0)
    timeline.begin(2.0, [A])
    timeline.begin(2.0, [B])
    timeline.compute(1.0)
    timeline.need([B])  # which ends at 4
    assert timeline.waits == [1.0, 2.0]
    timeline.need([A])
    assert timeline.waits == [1.0, 2.0]


def test_an_exchange_that_the_worker_waits_for_comes_after_those_that_have_begun():
    timeline = StepTimeline(overlap=1.0)
    timeline.begin(2.0, [A])
    timeline.exchange(1.0)
    assert timeline.waits == [2.0, 1.0]


def test_a_part_of_an_exchange_may_take_the_worker():
    timeline = StepTimeline(overlap=0.75)
    timeline.begin(4.0, [A])
    timeline.compute(10.0)
    timeline.finish()
    assert timeline.waits == [1.0]


def test_without_overlap_the_order_does_not_matter():
    timeline = StepTimeline(overlap=0.0)
    timeline.begin(2.0, [A])
    timeline.compute(10.0)
    timeline.begin(3.0, [B, C])
    timeline.finish()
    assert timeline.waits == [2.0, 3.0]
