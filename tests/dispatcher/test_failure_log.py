"""Failures that are kept for people."""

import pytest

from gt.core.messages import DefineSite, Failure, OpFailed
from gt.dispatcher.failure_log import KEPT, FailureLog
from gt.dispatcher.state_records import SessionRecord
from tests.dispatcher_harness import A, harness_with


def failure(origin=5, worker=0, message="bad"):
    return Failure(worker, "aten.mm.default", (), 0, origin, "RuntimeError", message, "Traceback")


@pytest.fixture
def log():
    return FailureLog(clock=lambda: 7.0)


def test_a_failure_of_several_workers_is_one(log):
    for worker in (1, 0, 1):
        log.note(SessionRecord(1, "here", 2), failure(worker=worker))
    (kept,) = log.latest()
    assert (log.count, kept.workers, kept.time) == (1, (0, 1), 7.0)


def test_the_last_failures_are_kept_and_all_are_counted(log):
    for origin in range(KEPT + 5):
        log.note(SessionRecord(1, "here", 2), failure(origin, message=f"bad {origin}"))
    kept = log.latest()
    assert (log.count, len(kept), kept[0].number) == (KEPT + 5, KEPT, KEPT + 5)


def test_what_fails_again_in_the_same_way_is_kept_once(log):
    for origin in range(KEPT + 5):
        log.note(SessionRecord(1, "here", 2), failure(origin))
    log.note(SessionRecord(1, "here", 2), failure(1000, message="worse"))
    for worker in (0, 1):
        log.note(SessionRecord(1, "here", 2), failure(1001, worker))
    again, other = log.latest()
    assert (again.times, again.number, again.workers, log.count) == (KEPT + 6, 1, (0, 1), KEPT + 7)
    assert (other.message, other.times) == ("worse", 1)


def test_a_failure_that_a_client_is_told_of_is_kept_with_its_line():
    harness = harness_with()
    harness.tell(DefineSite(1, "train.py", 12, "step"))
    harness.state.note_use(1, (0,))
    harness.report(0, OpFailed(1, Failure(0, "aten.mm.default", (), 1, A, "RuntimeError", "bad", "Traceback")))
    (kept,) = harness.dispatcher.failures.latest()
    assert (kept.line, kept.kind, kept.session) == ("train.py:12", "RuntimeError", 1)
