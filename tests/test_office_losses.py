"""Workers that go and workers that come, as list comparisons."""

import pytest

from gt.core.messages import (
    DefineSite,
    FetchTensor,
    FreeTensors,
    Goodbye,
    LocateTensor,
    Lost,
    StoreReady,
    Synchronize,
    Synchronized,
    WorkerCreateTensor,
    WorkerFetchTensor,
    WorkerFreeTensors,
    WorkerHostStore,
    WorkerJoinStore,
)
from gt.dispatcher.office import ToClient, ToWorker
from gt.dispatcher.state import RECENT
from tests.desks import OP, OP2, REQUEST, REQUEST2, A, B, C, D, Desk, E, answers, create, desk_with, kind, query, run
from tests.records import ADD, ADD_, NONZERO, RESIZE_, ZEROS, signature

STORE = WorkerJoinStore("127.0.0.1", 40000, "hosted by 0")


def test_the_loss_of_a_worker_is_told_to_every_session():
    desk = desk_with(2)
    desk.open()
    news = Lost(0, 1, 1001, "was killed", "aten.mm (train.py:3)")
    assert desk.lose(1, "was killed", "aten.mm (train.py:3)") == [ToClient(1, news), ToClient(2, news)]


def test_a_worker_is_lost_once():
    desk = desk_with(2)
    desk.lose(1)
    assert desk.lose(1) == []


@pytest.mark.parametrize("request_", [FetchTensor(REQUEST, B), query(OP, (B,)), Synchronize(REQUEST)], ids=kind)
def test_a_request_that_waits_for_a_lost_worker_fails_at_once(request_):
    desk = desk_with(2)
    desk.define(OP, NONZERO)
    desk.tell(request_)
    assert answers(desk.lose(1))[0] == Lost(REQUEST, 1, 1001, "was killed", "aten.mm")
    assert desk.report(0, Synchronized(REQUEST)) == []


@pytest.mark.parametrize("request_", [FetchTensor(REQUEST, B), LocateTensor(REQUEST, B), query(OP, (B,))], ids=kind)
def test_a_request_for_a_lost_tensor_names_the_worker(request_):
    desk = desk_with(2)
    desk.define(OP, NONZERO)
    desk.lose(1)
    assert desk.tell(request_) == [ToClient(1, Lost(REQUEST, 1, 1001, "was killed", "aten.mm"))]


def test_the_results_of_an_op_on_a_lost_tensor_are_lost():
    desk = desk_with(2)
    desk.define(OP, ADD)
    desk.lose(1)
    assert desk.tell(run(OP, (A, B), (C,)), run(OP, (C, A), (D,))) == []
    assert desk.state.lost == {B: 1, C: 1, D: 1}
    assert answers(desk.tell(FetchTensor(REQUEST, D))) == [Lost(REQUEST, 1, 1001, "was killed", "aten.mm")]


@pytest.mark.parametrize("inputs", [(A, B), (B, A)], ids=["reads a lost tensor", "writes a lost tensor"])
def test_a_write_that_cannot_be_done_consumes_its_target(inputs):
    desk = desk_with(2)
    desk.define(OP, ADD_)
    desk.lose(1)
    freed = desk.tell(run(OP, inputs, (C,)))
    assert desk.state.metas.keys() == {inputs[1], C} == set(desk.state.held_by(1))
    assert desk.state.lost[C] == 1
    assert freed == ([ToWorker(0, WorkerFreeTensors((A,)))] if inputs[0] == A else [])


def test_what_a_query_on_a_lost_tensor_writes_is_lost():
    desk = desk_with(2)
    desk.define(OP, RESIZE_)
    desk.lose(1)
    desk.tell(query(OP, (A, B), (C,)))
    assert answers(desk.tell(FetchTensor(REQUEST2, C))) == [Lost(REQUEST2, 1, 1001, "was killed", "aten.mm")]


def test_a_copy_survives_the_loss_of_the_original():
    desk = desk_with(2)
    desk.define(OP, ADD)
    desk.tell(run(OP, (A, B), (C,)))
    desk.lose(1)
    assert desk.tell(FetchTensor(REQUEST, B)) == [ToWorker(0, WorkerFetchTensor(REQUEST, B, True))]


def test_a_lost_tensor_can_be_freed():
    desk = desk_with(2)
    desk.lose(1)
    assert desk.tell(FreeTensors((B,))) == []
    assert set(desk.state.metas) == {A} == set(desk.state.held_by(1))


def test_a_lost_worker_is_not_commanded():
    desk = desk_with(3)
    desk.lose(1)
    told = [*desk.tell(Synchronize(REQUEST)), *desk.create(C, D, E), *desk.close()]
    assert {message.worker for message in told} == {0, 2}


def test_a_worker_that_leaves_is_lost_with_its_reason():
    desk = desk_with(2)
    (news,) = answers(desk.report(1, Goodbye("MemoryError: 3 GB")))
    assert (news.worker, news.pid, news.reason) == (1, 1001, "left: MemoryError: 3 GB")
    assert set(desk.state.workers) == {0}


def test_the_last_op_of_a_worker_is_named_with_its_line():
    desk = desk_with()
    desk.define(OP, ADD)
    desk.define(OP2, ADD_)
    desk.tell(DefineSite(1, "train.py", 12, "step"), DefineSite(2, "train.py", 13, "step"))
    desk.tell(run(OP, (A, B), (C,), site=1), run(OP2, (A, B), (D,), site=2))
    sent = desk.state.workers[0].sent
    assert desk.office.last_op(0, -1) == "aten.add_.Tensor (train.py:13)"  # its progress is not known
    assert desk.office.last_op(0, sent) == "aten.add_.Tensor (train.py:13)"
    assert desk.office.last_op(0, sent - 1) == "aten.add.Tensor (train.py:12)"


def test_an_op_sent_after_the_one_a_worker_is_at_is_not_its_last():
    desk = desk_with()
    desk.define(OP, signature("aten.early", 1))
    desk.define(OP2, signature("aten.late", 1))
    desk.tell(run(OP, (A,), ()))
    reached = desk.state.workers[0].sent
    desk.office.instruct(1, [run(OP2, (A,), ())] * (2 * RECENT), [])
    assert "aten.late" not in desk.office.last_op(0, reached)


def test_a_worker_that_has_run_nothing_has_no_last_op():
    assert desk_with().office.last_op(0, -1) == ""


def without_workers():
    desk = desk_with(2)
    desk.lose(1)
    desk.lose(0)
    return desk


@pytest.mark.parametrize("make", [create(C), run(OP, (), (C,))], ids=kind)
def test_what_is_made_without_any_worker_is_lost(make):
    desk = without_workers()
    desk.define(OP, ZEROS)
    desk.tell(make)
    (answer,) = answers(desk.tell(FetchTensor(REQUEST, C)))
    assert isinstance(answer, Lost) and answer.request == REQUEST


@pytest.mark.parametrize("request_", [Synchronize(REQUEST), query(OP, ())], ids=kind)
def test_a_request_without_any_worker_is_answered(request_):
    desk = without_workers()
    desk.define(OP, signature("aten.tensor", 0))
    (answer,) = answers(desk.tell(request_))
    assert isinstance(answer, Lost) and answer.request == REQUEST


def test_a_worker_that_joins_after_all_were_lost_gets_work():
    desk = without_workers()
    desk.join()
    assert [message.worker for message in desk.create(C)] == [2]


def test_one_worker_needs_no_store():
    desk = Desk(0)
    assert desk.join() == []
    assert [info.worker for info in desk.office.ready_workers()] == [0]


def test_two_workers_meet_at_a_store_that_one_hosts():
    desk = Desk(0)
    desk.join()
    assert desk.join() == [ToWorker(0, WorkerHostStore())]
    assert desk.join() == []
    assert [info.worker for info in desk.office.ready_workers()] == [0]
    assert desk.report(0, StoreReady(40000)) == [ToWorker(worker, STORE) for worker in range(3)]
    assert [info.worker for info in desk.office.ready_workers()] == [0, 1, 2]


def test_a_worker_gets_no_work_before_it_knows_the_store():
    desk = desk_with(1)
    desk.join()
    assert [message.worker for message in desk.create(C, D)] == [0, 0]


def test_a_worker_that_joins_later_is_told_the_store_and_gets_work():
    desk = desk_with(2)
    assert desk.join() == [ToWorker(2, STORE)]
    assert [message.worker for message in desk.create(C)] == [2]


def test_ids_of_workers_are_not_used_again():
    desk = Desk(2)
    desk.lose(1)
    desk.join()
    assert set(desk.state.workers) == {0, 2}


def test_another_worker_hosts_the_store_when_its_host_is_lost():
    desk = Desk(3)
    assert desk.lose(0) == [ToWorker(1, WorkerHostStore())]
    store = WorkerJoinStore("127.0.0.1", 40001, "hosted by 1")
    assert desk.report(1, StoreReady(40001)) == [ToWorker(1, store), ToWorker(2, store)]


def test_a_worker_left_alone_becomes_ready():
    desk = Desk(0)
    desk.join()
    desk.join()
    desk.lose(0)  # before it could report the store
    assert [info.worker for info in desk.office.ready_workers()] == [1]


@pytest.mark.parametrize("lost", [(0,), (1, 0), (0, 1)], ids=str)
def test_a_newcomer_is_not_sent_to_the_store_of_a_lost_worker(lost):
    desk = Desk(2)
    for worker in lost:
        desk.lose(worker)
    assert ToWorker(2, STORE) not in desk.join()


def test_someone_gets_the_work_while_a_new_store_is_made():
    desk = Desk(0)
    for _ in range(3):
        desk.join()
    desk.open()
    desk.lose(0)  # before it could report the store
    assert [type(message.command) for message in desk.create(A)] == [WorkerCreateTensor]
