"""Failures are written to the store, and read from there by those who see a flag."""

import time

import torch.distributed as dist

from gt.worker.exchange import failure_store
from gt.worker.exchange.failure_store import FailureStore
from tests.worker.exchange.tasks import FAILING

MEMBERS = (0, 1)


def test_a_failure_is_read_by_another_member():
    store = dist.HashStore()
    FailureStore(lambda: store, 0).write(MEMBERS, 3, 1, FAILING)
    assert FailureStore(lambda: store, 1).read(MEMBERS, 3, 1).failure == FAILING.failure


def test_a_failure_that_is_no_longer_kept_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(failure_store, "_KEPT", 2)
    store = dist.HashStore()
    failures = FailureStore(lambda: store, 0)
    for number in range(4):
        failures.write(MEMBERS, number, 0, FAILING)
    start = time.monotonic()
    messages = [failures.read(MEMBERS, number, 0).failure.message for number in range(4)]
    assert time.monotonic() - start < 10
    assert ["not in the store" in message for message in messages] == [True, True, False, False]


def test_a_failure_whose_store_has_ended_is_still_a_failure():
    def ended():
        raise RuntimeError("connection closed")

    failure = FailureStore(ended, 7).read(MEMBERS, 1, 0).failure
    assert failure.worker == 7 and "connection closed" in failure.message


def test_a_store_that_has_ended_takes_no_text_and_raises_nothing(caplog):
    """The members stay in step: the flag tells that the task has failed."""

    def ended():
        raise RuntimeError("connection closed")

    FailureStore(ended, 7).write(MEMBERS, 1, 0, FAILING)
    assert "connection closed" in caplog.text
