"""Requests, queries and failed exchanges when a worker is lost."""

import msgspec
import pytest

from gt.core.errors import ProtocolError
from gt.core.messages import (
    Failed,
    FetchTensor,
    LocateTensor,
    Lost,
    LostLine,
    OpFailed,
    Queried,
    ReadTraffic,
    Synchronize,
    Synchronized,
    Traffic,
)
from gt.dispatcher.message_queue import ToClient
from tests.dispatcher.lost_workers import lost, without_workers
from tests.dispatcher_harness import (
    OP,
    REQUEST,
    REQUEST2,
    A,
    B,
    C,
    D,
    E,
    answers,
    harness_with,
    kind,
    query,
    sharded_harness,
    told,
)
from tests.records import FAILURE, LARGE, NONZERO, RESIZE_, SMALL, own, signature


@pytest.mark.parametrize("request_", [FetchTensor(REQUEST, B), query(OP, (B,)), Synchronize(REQUEST)], ids=kind)
def test_a_request_that_waits_for_a_lost_worker_fails_at_once(request_):
    harness = harness_with(2)
    harness.define(OP, NONZERO)
    harness.tell(request_)
    assert answers(harness.lose(1))[0] == Lost(REQUEST, 1, 1001, "was killed", "aten.mm")
    if isinstance(request_, Synchronize):
        assert harness.report(0, Synchronized(REQUEST)) == []


@pytest.mark.parametrize("request_", [FetchTensor(REQUEST, B), LocateTensor(REQUEST, B), query(OP, (B,))], ids=kind)
def test_a_request_for_a_lost_tensor_names_the_worker(request_):
    harness = harness_with(2)
    harness.define(OP, NONZERO)
    harness.lose(1)
    assert harness.tell(request_) == [ToClient(1, Lost(REQUEST, 1, 1001, "was killed", "aten.mm"))]


@pytest.mark.parametrize("request_", [Synchronize(REQUEST), query(OP, ())], ids=kind)
def test_a_request_without_any_worker_is_answered(request_):
    harness = without_workers()
    harness.define(OP, signature("aten.tensor", 0))
    (answer,) = answers(harness.tell(request_))
    assert isinstance(answer, Lost) and answer.request == REQUEST


def query_of_two():
    """A query that writes to a tensor which is whole on two workers."""
    harness = sharded_harness(text="-")
    harness.define(OP, RESIZE_)
    harness.create(B)
    assert told(harness.tell(query(OP, (A, B), (C,))))[-1] == "0 1: op?(A, c2) -> C"
    return harness


def test_a_query_goes_on_with_the_workers_that_are_left():
    harness = query_of_two()
    assert lost(harness.lose(1)) == ["0: free c2", "client: Lost"]  # news, and not an answer
    queried = Queried(REQUEST, (SMALL,), (LARGE,))
    assert answers(harness.report(0, queried)) == [queried]
    assert [harness.layout(ident) for ident in (C, D)] == ["- on 0", "- on 0"]
    assert harness.state.meta(C) == LARGE


def test_a_query_ends_with_the_loss_of_the_last_worker_that_is_waited_for():
    harness = query_of_two()
    queried = Queried(REQUEST, (SMALL,), (LARGE,))
    assert harness.report(0, queried) == []
    assert answers(harness.lose(1))[0] == queried
    assert [harness.layout(ident) for ident in (C, D)] == ["- on 0", "- on 0"]


def test_a_worker_that_was_heard_already_may_be_lost():
    harness = query_of_two()
    queried = Queried(REQUEST, (SMALL,), (LARGE,))
    harness.report(1, queried)
    harness.lose(1)
    assert answers(harness.report(0, queried)) == [queried]
    assert harness.layout(D) == "- on 0"


@pytest.mark.parametrize("first", [0, 1])
def test_a_query_fails_where_any_worker_fails(first):
    harness = query_of_two()
    replies = [Queried(REQUEST, (SMALL, LARGE), (SMALL,)), Failed(REQUEST, FAILURE)]
    assert harness.report(0, replies[first]) == []
    assert told(harness.report(1, replies[1 - first])) == ["0 1: free D, E", "client: Failed"]
    assert not {D, E} & harness.state.tensors.keys()


def test_another_answer_to_a_query_is_refused():
    harness = query_of_two()
    with pytest.raises(ProtocolError, match="Synchronized is not an answer to a query"):
        harness.report(0, Synchronized(REQUEST))
    queried = Queried(REQUEST, (SMALL, LARGE), (SMALL,))
    assert harness.report(0, queried) == []
    assert answers(harness.report(1, queried)) == [queried]


def test_traffic_cannot_be_read_from_a_lost_worker():
    harness = harness_with(2)
    harness.tell(ReadTraffic(REQUEST, True))
    assert answers(harness.lose(1))[0] == Lost(REQUEST, 1, 1001, "was killed", "aten.mm")
    assert harness.report(0, Traffic(REQUEST, {})) == []


FAILED_EXCHANGE = msgspec.structs.replace(FAILURE, op="exchange", site=7, origin=own(9), peers=(0, 1))


def test_an_exchange_that_fails_before_the_loss_is_known_is_the_loss():
    harness = harness_with(2)
    harness.tell(FetchTensor(REQUEST, A))
    assert harness.report(0, OpFailed(1, FAILED_EXCHANGE)) == [] == harness.report(0, Failed(REQUEST, FAILED_EXCHANGE))
    assert harness.dispatcher.note_process_check() == []
    lost = Lost(REQUEST, 1, 1001, "was killed", "aten.mm", 7)
    assert answers(harness.lose(1)) == [
        lost,
        Lost(0, 1, 1001, "was killed", "aten.mm", lines=(LostLine(0, 1, 16, ("float32[4]",)),)),
    ]
    harness.tell(FetchTensor(REQUEST2, A))
    assert answers(harness.report(0, Failed(REQUEST2, FAILED_EXCHANGE))) == [
        msgspec.structs.replace(lost, request=REQUEST2)
    ]
    assert harness.report(0, OpFailed(1, FAILED_EXCHANGE)) == []


def test_a_failed_exchange_without_a_lost_worker_is_told_after_a_few_checks():
    harness = harness_with(2)
    harness.tell(FetchTensor(REQUEST, A))
    failures = [OpFailed(1, FAILED_EXCHANGE), Failed(REQUEST, FAILED_EXCHANGE)]
    assert [harness.report(0, failure) for failure in failures] == [[], []]
    assert [answers(harness.dispatcher.note_process_check()) for _ in range(5)] == [[], [], [], failures, []]
    harness.tell(FetchTensor(REQUEST2, A))
    again = Failed(REQUEST2, FAILED_EXCHANGE)
    assert answers(harness.report(0, again)) == [again]
