"""Reads from several holders, and uploads to several workers: answers, failures, losses, false reports."""

import msgspec
import pytest

from gt.core.errors import ProtocolError
from gt.core.messages import (
    ByteRange,
    CreateTensor,
    Failed,
    Fetched,
    FetchTensor,
    FreeTensors,
    Lost,
    MoreRoomNeeded,
    Rejected,
    TensorRead,
    Uploaded,
    WorkerCreateTensor,
    WorkerFetchTensor,
)
from gt.dispatcher.message_queue import ToClient, ToWorkers
from gt.sharding.spec import DeviceMesh
from tests.dispatcher_harness import (
    REQUEST,
    A,
    B,
    C,
    DispatcherHarness,
    answers,
    gathered_harness,
    over,
    sharded_harness,
    told,
)
from tests.records import FAILURE, INLINE, SHARED, SMALL, meta

HALF = ByteRange("", 8)
OTHER = msgspec.structs.replace(FAILURE, message="another")


def told_of_read(outgoing):
    return [answer for answer in answers(outgoing) if getattr(answer, "request", 0) == REQUEST]


def reading(text="x"):
    harness = sharded_harness(text=text)
    harness.tell(FetchTensor(REQUEST, A))
    return harness


def test_the_first_holder_of_each_part_is_asked():
    harness = DispatcherHarness(4)
    harness.open()
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    harness.tell(CreateTensor(A, meta(4, 4), ByteRange("", 64), over("dp, -", mesh).record(), 0))
    assert told(harness.tell(FetchTensor(REQUEST, A))) == ["0: fetch A", "2: fetch A"]


def test_the_part_of_one_worker_is_asked_of_it_alone():
    harness = sharded_harness(text="x")
    assert told(harness.tell(FetchTensor(REQUEST, A, worker=1))) == ["1: fetch A"]


def test_a_part_of_a_worker_without_one_is_refused():
    harness = sharded_harness(text="x")
    (answer,) = answers(harness.tell(FetchTensor(REQUEST, A, worker=7)))
    assert isinstance(answer, Rejected) and "worker 7 holds no part" in answer.reason


def test_holders_of_no_elements_are_not_asked():
    harness = sharded_harness(text="x", meta=meta(1))
    assert told(harness.tell(FetchTensor(REQUEST, A))) == ["0: fetch A"]


def test_each_holder_writes_to_its_own_place():
    harness = sharded_harness(text="x")
    sent = harness.tell(FetchTensor(REQUEST, A, place=SHARED))
    places = [msgspec.structs.replace(SHARED, nbytes=8), msgspec.structs.replace(SHARED, nbytes=8, offset=8)]
    assert sent == [
        ToWorkers((worker,), WorkerFetchTensor(REQUEST, A, 0, place)) for worker, place in enumerate(places)
    ]
    harness.report(0, Fetched(REQUEST, places[0]), b"")
    read = TensorRead(REQUEST, tuple(places), over("x").record())
    assert harness.report(1, Fetched(REQUEST, places[1]), b"") == [ToClient(1, read, (b"", b""))]


def test_the_addends_of_a_partial_tensor_need_more_room():
    harness = sharded_harness(text="- + x")
    assert harness.tell(FetchTensor(REQUEST, A, place=SHARED)) == [ToClient(1, MoreRoomNeeded(REQUEST, 32))]
    assert harness.state.pending == {}
    assert len(harness.tell(FetchTensor(REQUEST, A, place=msgspec.structs.replace(SHARED, nbytes=32)))) == 2


def test_a_copy_with_fewer_bytes_is_read():
    harness = sharded_harness(text="- + x")
    harness.redistribute(A, B, "x")
    assert told(harness.tell(FetchTensor(REQUEST, B))) == ["0: fetch B", "1: fetch B"]
    assert told(gathered_harness().tell(FetchTensor(REQUEST, A))) == ["0: fetch c2"]


# Failures and losses


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_holder_is_the_answer(failing):
    harness = reading()
    replies = {failing: Failed(REQUEST, FAILURE), 1 - failing: Fetched(REQUEST, HALF)}
    assert harness.report(1, replies[1], b"12345678") == []
    assert harness.report(0, replies[0], b"12345678") == [ToClient(1, Failed(REQUEST, FAILURE))]


def test_of_several_failures_that_of_the_first_part_is_the_answer():
    harness = reading()
    harness.report(1, Failed(REQUEST, OTHER))
    assert harness.report(0, Failed(REQUEST, FAILURE)) == [ToClient(1, Failed(REQUEST, FAILURE))]


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("has_replied", [False, True])
def test_the_loss_of_a_holder_is_answered_once_and_late_replies_are_dropped(lost, has_replied):
    harness = reading()
    if has_replied:
        harness.report(1 - lost, Fetched(REQUEST, HALF), b"12345678")
    sent = told_of_read(harness.lose(lost))
    assert [type(answer) for answer in sent] == [Lost] and sent[0].worker == lost
    if not has_replied:
        assert harness.report(1 - lost, Fetched(REQUEST, HALF), b"12345678") == []
    assert harness.state.pending == {}


def test_a_holder_that_is_lost_after_its_reply_is_not_missed():
    harness = reading()
    harness.report(0, Fetched(REQUEST, HALF), b"left half")
    assert told_of_read(harness.lose(0)) == []
    (answer,) = answers(harness.report(1, Fetched(REQUEST, HALF), b"right"))
    assert isinstance(answer, TensorRead)


# False reports


def test_a_holder_that_replies_twice_is_refused():
    harness = reading()
    harness.report(1, Fetched(REQUEST, HALF), b"12345678")
    with pytest.raises(ProtocolError, match="worker 1 was not asked for request"):
        harness.report(1, Fetched(REQUEST, HALF), b"12345678")
    assert harness.state.pending[REQUEST].waiting_for == {0}


@pytest.mark.parametrize(
    "byte_range",
    [ByteRange("", 16), msgspec.structs.replace(SHARED, nbytes=8), ByteRange("gt-1-1-1-0123456789abcdef", 8, 8)],
    ids=["size", "place of another", "shared buffer of another"],
)
def test_a_reply_in_another_place_is_refused(byte_range):
    harness = sharded_harness(text="x")
    harness.tell(FetchTensor(REQUEST, A, place=SHARED))
    with pytest.raises(ProtocolError, match="is not the one|was read as"):
        harness.report(1, Fetched(REQUEST, byte_range), b"")


def test_a_holder_may_send_its_part_with_the_message():
    harness = sharded_harness(text="x")
    harness.tell(FetchTensor(REQUEST, A, place=SHARED))
    own = msgspec.structs.replace(SHARED, nbytes=8)
    harness.report(0, Fetched(REQUEST, own), b"")
    (answer,) = answers(harness.report(1, Fetched(REQUEST, HALF), b"12345678"))
    assert answer.byte_ranges == (own, HALF)


# Uploads


def upload(text, byte_range=INLINE, ident=A, of=SMALL):
    return CreateTensor(ident, of, byte_range, over(text).record(), 3)


def test_each_worker_gets_its_own_part():
    harness = DispatcherHarness(2)
    harness.open()
    sent = harness.tell(upload("x"), buffers=[b"0123456789abcdef"])
    commands = [WorkerCreateTensor(A, meta(2), HALF, 3)] * 2
    assert sent == [ToWorkers((0,), commands[0], b"01234567"), ToWorkers((1,), commands[1], b"89abcdef")]
    assert harness.layout(A) == "x on 0 1" and harness.state.tensors[A].placed


def test_replicas_are_one_command():
    harness = DispatcherHarness(2)
    harness.open()
    (sent,) = harness.tell(upload("-"), buffers=[b"0123456789abcdef"])
    assert sent == ToWorkers((0, 1), WorkerCreateTensor(A, SMALL, INLINE, 3), b"0123456789abcdef")


def test_shared_memory_is_the_clients_again_when_all_workers_have_their_parts():
    harness = DispatcherHarness(2)
    harness.open()
    sent = harness.tell(upload("x", SHARED), buffers=[[]])
    assert [out.command.byte_range.offset for out in sent] == [0, 8]
    assert harness.report(1, Uploaded(A)) == []
    harness.tell(FreeTensors((A,)))
    assert harness.report(0, Uploaded(A)) == [ToClient(1, Uploaded(A))]


@pytest.mark.parametrize("has_replied", [False, True])
def test_shared_memory_waits_for_the_workers_that_are_left(has_replied):
    harness = DispatcherHarness(2)
    harness.open()
    harness.tell(upload("-", SHARED), buffers=[[]])
    if has_replied:
        harness.report(1, Uploaded(A))
    lost = [answer for answer in answers(harness.lose(0)) if isinstance(answer, Uploaded)]
    assert lost == ([Uploaded(A)] if has_replied else [])
    if not has_replied:
        assert answers(harness.report(1, Uploaded(A))) == [Uploaded(A)]
    assert harness.state.pending == {}


def test_shared_memory_of_an_upload_without_workers_is_the_clients_again():
    harness = DispatcherHarness(1)
    harness.open()
    harness.lose(0)
    assert answers(harness.tell(CreateTensor(A, SMALL, SHARED, None, 0))) == [Uploaded(A)]
    assert A in harness.state.missing


@pytest.mark.parametrize(
    "wrong",
    [upload("- + x"), upload("x", ByteRange("", 8)), upload("x, -"), upload("x[0:1 1:3]")],
    ids=["partial", "size", "rank", "cuts"],
)
def test_a_layout_that_does_not_fit_is_refused(wrong):
    harness = DispatcherHarness(2)
    harness.open()
    (answer,) = answers(harness.tell(wrong, buffers=[bytes(16)]))
    assert isinstance(answer, Rejected) and A not in harness.state.tensors


def test_an_upload_is_reported_by_the_workers_that_were_asked():
    harness = DispatcherHarness(3)
    harness.open()
    harness.tell(upload("x", SHARED), buffers=[[]])
    for worker, ident in ((2, A), (0, C)):
        with pytest.raises(ProtocolError, match="was not asked"):
            harness.report(worker, Uploaded(ident))
