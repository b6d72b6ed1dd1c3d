"""Workers that join, and the store at which they find each other."""

import pytest

from gt.core.messages import (
    Joined,
    StoreReady,
    WorkerCreateTensor,
    WorkerHostStore,
    WorkerInfo,
    WorkerJoinStore,
    WorkerLosePeer,
)
from gt.dispatcher.message_queue import ToClient, ToWorkers
from tests.dispatcher.lost_workers import without_workers
from tests.dispatcher_harness import A, C, D, DispatcherHarness, answers, harness_with
from tests.records import meta, own

STORE = WorkerJoinStore("127.0.0.1", 40000, 0)


def test_a_worker_that_joins_after_all_were_lost_gets_work():
    harness = without_workers()
    harness.join()
    assert [message.workers for message in harness.create(C)] == [(2,)]


def test_one_worker_needs_no_store():
    harness = DispatcherHarness(0)
    assert harness.join() == []
    assert [info.worker for info in harness.dispatcher.ready_workers()] == [0]


def test_two_workers_meet_at_a_store_that_one_hosts():
    harness = DispatcherHarness(0)
    harness.join()
    assert harness.join() == [ToWorkers((0,), WorkerHostStore())]
    assert harness.join() == []
    assert [info.worker for info in harness.dispatcher.ready_workers()] == [0]
    assert harness.report(0, StoreReady(40000)) == [ToWorkers((0, 1, 2), STORE)]
    assert [info.worker for info in harness.dispatcher.ready_workers()] == [0, 1, 2]


def test_a_worker_gets_no_work_before_it_knows_the_store():
    harness = harness_with(1)
    harness.join()
    assert [message.workers for message in harness.create(C, D)] == [(0,), (0,)]


def test_a_worker_that_joins_later_is_told_the_store_and_gets_work():
    harness = harness_with(2)
    assert harness.join() == [ToWorkers((2,), STORE), ToClient(1, Joined(WorkerInfo(2, "cpu", "here", 1002)))]
    made = [message.workers for message in harness.create(C, D, own(5), meta=meta(1 << 19))]
    assert made == [(0,), (1,), (2,)]


def test_ids_of_workers_are_not_used_again():
    harness = DispatcherHarness(2)
    harness.lose(1)
    harness.join()
    assert set(harness.state.workers) == {0, 2}


def test_another_worker_hosts_the_store_when_its_host_is_lost():
    harness = DispatcherHarness(3)
    assert harness.lose(0) == [ToWorkers((1, 2), WorkerLosePeer(0)), ToWorkers((1,), WorkerHostStore())]
    store = WorkerJoinStore("127.0.0.1", 40001, 1)
    assert harness.report(1, StoreReady(40001)) == [ToWorkers((1, 2), store)]


def test_a_worker_left_alone_becomes_ready():
    harness = DispatcherHarness(0)
    harness.join()
    harness.join()
    harness.lose(0)  # before it could report the store
    assert [info.worker for info in harness.dispatcher.ready_workers()] == [1]


@pytest.mark.parametrize("lost", [(0,), (1, 0), (0, 1)], ids=str)
def test_a_newcomer_is_not_sent_to_the_store_of_a_lost_worker(lost):
    harness = DispatcherHarness(2)
    for worker in lost:
        harness.lose(worker)
    assert ToWorkers((2,), STORE) not in harness.join()


def test_one_worker_gets_the_work_while_a_new_store_is_started():
    harness = DispatcherHarness(0)
    for _ in range(3):
        harness.join()
    harness.open()
    harness.lose(0)  # before it could report the store
    assert [type(message.command) for message in harness.create(A)] == [WorkerCreateTensor]


def test_a_worker_that_becomes_ready_is_told_to_every_session():
    harness = harness_with(2)
    assert answers(harness.join()) == [Joined(WorkerInfo(2, "cpu", "here", 1002))]
    harness.lose(0)
    assert answers(harness.join()) == [], "it cannot exchange tensors before there is a store"
    joined = answers(harness.report(1, StoreReady(40001)))
    assert [news.worker.worker for news in joined] == [2, 3]


def ready(harness):
    return [info.worker for info in harness.dispatcher.ready_workers()]


def test_the_store_moves_to_a_worker_that_others_reach_when_one_of_another_machine_joins():
    harness = harness_with(2)
    assert harness.join("there", "10.0.0.2") == [ToWorkers((2,), WorkerHostStore())]
    assert ready(harness) == [0, 1], "they go on with their store"
    store = WorkerJoinStore("10.0.0.2", 40002, 2, "token")
    assert harness.report(2, StoreReady(40002, "token"))[0] == ToWorkers((0, 1, 2), store)
    assert ready(harness) == [0, 1, 2]
    assert harness.join("here")[0] == ToWorkers((3,), store)


def test_a_store_that_was_asked_for_before_another_host_was_chosen_is_not_used():
    harness = DispatcherHarness(0)
    for _ in range(2):
        harness.join()
    harness.join("there", "10.0.0.2")
    assert harness.report(0, StoreReady(40000)) == []
    assert harness.report(2, StoreReady(40002)) == [ToWorkers((0, 1, 2), WorkerJoinStore("10.0.0.2", 40002, 2))]


def test_a_host_of_the_store_that_all_reach_is_followed_by_another():
    harness = DispatcherHarness(0)
    for host, address in (("here", "127.0.0.1"), ("there", "10.0.0.2"), ("over there", "10.0.0.3")):
        harness.join(host, address)
    harness.report(1, StoreReady(40001))
    assert ready(harness) == [0, 1, 2]
    assert harness.lose(1)[-1] == ToWorkers((2,), WorkerHostStore())
