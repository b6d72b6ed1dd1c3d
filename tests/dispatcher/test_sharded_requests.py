"""Reads, queries and traffic of sharded tensors."""

import pytest

from gt.core.messages import (
    ByteRange,
    Collective,
    Failed,
    Fetched,
    FetchTensor,
    Located,
    LocateTensor,
    Queried,
    ReadTraffic,
    Redistribute,
    TensorRead,
    Traffic,
    TrafficRead,
    WorkerReadTraffic,
)
from gt.dispatcher.message_queue import ToClient, ToWorkers
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
    create,
    gathered_harness,
    given,
    harness_with,
    over,
    query,
    run,
    sharded_harness,
    told,
)
from tests.records import ADD_, FAILURE, LARGE, NO_RULE, NONZERO, RESIZE_, own


@pytest.mark.parametrize(("text", "nbytes"), [("x", 8), ("- + x", 16)])
def test_a_read_asks_all_holders_and_moves_nothing(text, nbytes):
    harness = sharded_harness(text=text)
    assert told(harness.tell(FetchTensor(REQUEST, A))) == ["0: fetch A", "1: fetch A"]
    assert (harness.layout(A), harness.state.copies) == (f"{text} on 0 1", {})
    part = ByteRange("", nbytes)
    assert harness.report(1, Fetched(REQUEST, part), b"right") == []
    read = TensorRead(REQUEST, (part, part), over(text).record())
    assert harness.report(0, Fetched(REQUEST, part), b"left") == [ToClient(1, read, (b"left", b"right"))]


def test_a_whole_tensor_is_read_without_a_move():
    harness = sharded_harness(text="-")
    assert told(harness.tell(FetchTensor(REQUEST, A))) == ["0: fetch A"]


def test_a_whole_copy_is_read_and_kept():
    harness = gathered_harness()
    assert told(harness.tell(FetchTensor(REQUEST, A))) == ["0: fetch c2"]
    assert harness.state.copies == {A: {over("-"): given(2)}}


def test_a_tensor_is_located_by_its_layout():
    harness = sharded_harness()
    assert answers(harness.tell(LocateTensor(REQUEST, A))) == [Located(REQUEST, over("x").record())]


def test_a_query_runs_on_all_workers_and_waits_for_them():
    harness = sharded_harness()
    harness.define(OP, NONZERO)
    assert told(harness.tell(query(OP, (A,)))) == [
        "client: Gathered",
        "0 1: define c3: redistribute",
        "0+1: c3(A) -> c2",
        "0 1: define op",
        "0 1: op?(c2)",
    ]
    queried = Queried(REQUEST, (LARGE,), ())
    assert harness.report(1, queried) == []
    assert harness.report(0, queried) == [ToClient(1, queried)]
    assert (harness.layout(A), harness.layout(D)) == ("x on 0 1", "- on 0 1")


def test_a_tensor_written_by_a_query_stays_whole():
    harness = sharded_harness()
    harness.create(B)
    harness.define(OP, RESIZE_)
    sent = told(harness.tell(query(OP, (A, B), (C,))))
    assert sent == [
        "client: Gathered",
        "0 1: define c3: redistribute",
        "0+1: c3(A) -> c2",
        "0 1: define c4: redistribute",
        "0 1: c4(c2) -> A",
        "0 1: free c2",
        "0 1: define c6: redistribute",
        "0+1: c6(B) -> c5",
        "0 1: define op",
        "0 1: op?(A, c5) -> C",
    ]
    assert (harness.layout(C), harness.state.copies) == ("- on 0 1", {B: {over("-"): given(5)}})


def test_a_query_that_fails_everywhere_is_answered_once():
    harness = sharded_harness()
    harness.define(OP, NONZERO)
    harness.tell(query(OP, (A,)))
    failed = Failed(REQUEST, FAILURE)
    assert harness.report(0, failed) == []
    assert harness.report(1, failed) == [ToClient(1, failed)]


def traffic(harness, watch, received=({}, {})):
    """The answer after every worker has reported its received bytes."""
    assert harness.tell(ReadTraffic(REQUEST, watch)) == [ToWorkers((0, 1), WorkerReadTraffic(REQUEST))]
    assert harness.report(1, Traffic(REQUEST, received[1])) == []
    (answer,) = answers(harness.report(0, Traffic(REQUEST, received[0])))
    assert isinstance(answer, TrafficRead) and answer.request == REQUEST
    return answer


def test_traffic_counts_the_bytes_that_each_worker_received():
    harness = harness_with(2)
    assert traffic(harness, False, ({1: 64}, {})) == TrafficRead(REQUEST, {0: {1: 64}, 1: {}}, ())


def test_collectives_are_told_while_they_are_watched():
    harness = sharded_harness()
    harness.define(OP, NO_RULE)
    assert traffic(harness, True).collectives == ()
    harness.tell(run(OP, (A,), (B,), site=7))  # gathers A
    harness.tell(run(OP, (A,), (C,), site=8))  # uses the gathered copy
    gather = Collective("all-gather", ("x",), 16, "aten.no_such.default", 7)
    assert traffic(harness, False).collectives == (gather,)
    harness.redistribute(A, D, "-")
    assert traffic(harness, True).collectives == ()


def test_collectives_are_watched_until_the_watch_ends():
    harness = sharded_harness()
    traffic(harness, True)
    harness.tell(Redistribute(A, B, over("-").record(), 3))
    assert [c.kind for c in traffic(harness, True).collectives] == ["all-gather"]
    harness.tell(Redistribute(A, C, over("-").record(), 4))
    assert [(c.op, c.site) for c in traffic(harness, False).collectives] == [("redistribute", 4)]


def test_collectives_of_a_program_are_told_each_time_it_runs():
    harness = sharded_harness(text="- + x")
    harness.redistribute(A, B, "- + x")
    harness.define(OP, ADD_)
    harness.create(C)
    harness.redistribute(C, D, "-")
    traffic(harness, True)
    harness.tell(run(OP, (A, D), (E,), site=1), run(OP, (B, D), (own(6),), site=2))
    told_of = [(c.kind, c.nbytes, c.op, c.site) for c in traffic(harness, False).collectives]
    assert told_of == [("all-reduce", 32, "aten.add_.Tensor", site) for site in (1, 2)]


def test_collectives_are_told_to_the_session_that_caused_them():
    harness = sharded_harness()
    other = harness.open()
    harness.tell(ReadTraffic(own(200, other), True), session=other)
    for worker in (0, 1):
        harness.report(worker, Traffic(own(200, other), {}))
    harness.redistribute(A, B, "-")
    assert harness.state.sessions[other].collectives == []


def test_collectives_are_not_collected_without_a_watch():
    harness = sharded_harness()
    harness.redistribute(A, B, "-")
    assert harness.state.sessions[1].collectives == []


def test_concurrent_requests_are_answered_by_their_ids():
    harness = harness_with(2)
    harness.tell(ReadTraffic(REQUEST, False), ReadTraffic(REQUEST2, False), create(C))
    for worker in (0, 1):
        harness.report(worker, Traffic(REQUEST2, {}))
    assert harness.dispatcher.waits() == {1: {0, 1}}
