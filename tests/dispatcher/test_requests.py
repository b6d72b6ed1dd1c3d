"""Fetches, queries, locations and synchronization: the workers that are asked, and the answers that clients get."""

import pytest

from gt.core.errors import ProtocolError
from gt.core.messages import (
    ByteRange,
    Failed,
    Fetched,
    FetchTensor,
    Located,
    LocateTensor,
    Queried,
    QueryOp,
    Synchronize,
    Synchronized,
    TensorRead,
    WorkerFetchTensor,
)
from gt.dispatcher.message_queue import ToClient, ToWorkers
from tests.dispatcher_harness import OP, REQUEST, A, B, C, D, DispatcherHarness, E, at, harness_with, query, run
from tests.records import ADD, FAILURE, LARGE, NONZERO, RESIZE_, SHARED, SMALL, own


def test_a_fetch_is_answered_by_the_worker_that_holds_the_tensor():
    harness = harness_with(2)
    fetched = Fetched(REQUEST, ByteRange("", 16))
    assert harness.tell(FetchTensor(REQUEST, B)) == [ToWorkers((1,), WorkerFetchTensor(REQUEST, B))]
    read = TensorRead(REQUEST, (fetched.byte_range,))
    assert harness.report(1, fetched, b"0123456789abcdef") == [ToClient(1, read, (b"0123456789abcdef",))]
    with pytest.raises(ProtocolError, match="worker 1 was not asked for request 200"):
        harness.report(1, fetched, b"again")


@pytest.mark.parametrize(("client", "worker", "shared"), [("here", "here", True), ("here", "there", False)])
def test_memory_is_shared_on_one_machine_only(client, worker, shared):
    harness = DispatcherHarness(0)
    harness.join(host=worker)
    harness.open(host=client)
    harness.create(A)
    fetch = FetchTensor(REQUEST, A, place=SHARED)
    command = WorkerFetchTensor(REQUEST, A, place=SHARED if shared else None)
    assert harness.tell(fetch) == [ToWorkers((0,), command)]


def test_a_failed_fetch_is_answered_with_the_failure():
    harness = harness_with()
    harness.tell(FetchTensor(REQUEST, A))
    assert harness.report(0, Failed(REQUEST, FAILURE)) == [ToClient(1, Failed(REQUEST, FAILURE))]


def test_the_results_of_a_query_are_placed_where_it_ran():
    harness = harness_with(2)
    harness.define(OP, NONZERO)
    queried = Queried(REQUEST, (LARGE, 3, SMALL), ())
    sent = harness.tell(query(OP, (B,)))
    assert sent[-1] == ToWorkers((1,), QueryOp(REQUEST, OP, (B,), (), D, (), 0, 0))
    assert harness.report(1, queried) == [ToClient(1, queried)]
    assert [harness.state.tensors[ident][:2] for ident in (D, E)] == [(LARGE, at(1)), (SMALL, at(1))]
    assert set(harness.state.tensors_of(1)) == {A, B, D, E}


def test_a_query_may_resize_a_tensor_that_it_writes():
    harness = harness_with()
    harness.define(OP, RESIZE_)
    harness.tell(query(OP, (A, B), (C,)))
    assert harness.state.meta(C) == SMALL and A not in harness.state.tensors
    harness.report(0, Queried(REQUEST, (), (LARGE,)))
    assert harness.state.meta(C) == LARGE
    assert set(harness.state.tensors_of(1)) == {B, C}


def test_a_tensor_is_located_without_asking_a_worker():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, B), (C,)))
    located = Located(REQUEST, at(1).record(), (at(0).record(),))  # the op needed a copy
    assert harness.tell(LocateTensor(REQUEST, B)) == [ToClient(1, located)]


def test_synchronize_waits_for_every_worker():
    harness = harness_with(3)
    assert harness.tell(Synchronize(REQUEST)) == [ToWorkers((0, 1, 2), Synchronize(REQUEST))]
    assert harness.report(0, Synchronized(REQUEST)) == []
    assert harness.report(2, Synchronized(REQUEST)) == []
    assert harness.report(1, Synchronized(REQUEST)) == [ToClient(1, Synchronized(REQUEST))]


def test_an_answer_goes_to_the_session_that_asked():
    harness = harness_with()
    other = harness.open()
    harness.tell(Synchronize(REQUEST))
    harness.tell(Synchronize(own(200, other)), session=other)
    assert harness.report(0, Synchronized(own(200, other))) == [ToClient(2, Synchronized(own(200, other)))]
    assert harness.report(0, Synchronized(REQUEST)) == [ToClient(1, Synchronized(REQUEST))]
