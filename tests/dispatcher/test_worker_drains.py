"""Workers that leave: their tensors move to others before they end."""

import pytest

from gt.core.errors import ProtocolError
from gt.core.messages import TOLD_TO_END as TOLD
from gt.core.messages import (
    FetchTensor,
    FreeTensors,
    Goodbye,
    Leaving,
    Left,
    Lost,
    Synchronize,
    Synchronized,
    WorkerShutdown,
)
from gt.dispatcher import worker_drains
from gt.dispatcher.message_queue import ToWorkers
from gt.sharding.spec import DeviceMesh
from tests.dispatcher_harness import (
    OP,
    PAIR,
    REQUEST,
    A,
    B,
    C,
    D,
    DispatcherHarness,
    E,
    answers,
    harness_with,
    kind,
    over,
    query,
    run,
    sharded_harness,
)
from tests.records import ADD, NO_RULE, RESIZE_, ZEROS, meta

FOUR = meta(4, 4)


def leave(harness, worker=1):
    return harness.report(worker, Leaving())


def asked(outgoing):
    """The request that asks workers whether they have moved tensors, and these workers."""
    (found,) = [out for out in outgoing if isinstance(out, ToWorkers) and isinstance(out.command, Synchronize)]
    return found.command.request, found.workers


def answer(harness, outgoing):
    """All workers that were asked have moved the tensors. Returns the messages that follow."""
    request, workers = asked(outgoing)
    sent = [message for worker in workers for message in harness.report(worker, Synchronized(request))]
    for _ in range(worker_drains.CHECKS):
        sent += harness.checked(harness.dispatcher.note_process_check())
    return sent


def is_dismissed(outgoing, worker=1):
    return outgoing == [ToWorkers((worker,), WorkerShutdown())]


def drain(harness, worker=1):
    """A worker leaves, and all do their part."""
    assert is_dismissed(answer(harness, answer(harness, leave(harness, worker))), worker)
    return harness.report(worker, Goodbye(TOLD))


def test_whole_tensors_move_to_the_worker_with_the_fewest_bytes():
    harness = harness_with(3)
    harness.create(C, D, E)
    assert [harness.layout(ident) for ident in (A, B, C, D, E)] == ["- on 0", "- on 1", "- on 2", "- on 0", "- on 1"]
    drain(harness)
    assert [harness.layout(ident) for ident in (A, B, C, D, E)] == ["- on 0", "- on 2", "- on 2", "- on 0", "- on 0"]
    assert not harness.state.tensors[B].placed, "the first scope that uses it still moves it for good"


@pytest.mark.parametrize(
    ("workers", "text", "moved"),
    [
        (3, "x", "x on 0 2"),  # a spare worker takes the part
        (3, "-", "- on 0 2"),
        (3, "- + x", "- on 0 2"),  # reduced
        (2, "x", "x on 0"),
        (2, "-", "- on 0"),
        (2, "- + x", "- on 0"),
    ],
)
def test_laid_out_tensors_keep_their_layout(workers, text, moved):
    harness = sharded_harness(workers, text)
    drain(harness)
    assert harness.layout(A) == moved


@pytest.mark.parametrize(
    ("text", "moved"),
    [("x, y", "x, y on 2 3"), ("y, -", "y, - on 2 3"), ("x y, -", "x y, - on 2 3"), ("-, -", "-, - on 2 3")],
)
def test_a_mesh_without_a_spare_worker_loses_one_coordinate_for_all_its_tensors(text, moved):
    harness = DispatcherHarness(4)
    harness.open()
    harness.create(E, meta=FOUR)
    mesh = DeviceMesh([2, 2], ["x", "y"])
    harness.redistribute(E, A, text, mesh)
    harness.tell(FreeTensors((E,)))
    drain(harness)
    assert harness.layout(A) == moved
    assert harness.state.tensors[A].spec.mesh.shape == (1, 2)


def test_sessions_are_told_once_and_a_loss_is_none():
    harness = harness_with(2)
    harness.open()
    first = answers(leave(harness))
    assert first == [Left(1, 1001, f"left: {TOLD}")] * 2 and leave(harness) == []
    harness = harness_with(2)
    assert answers(drain(harness)) == []


def test_new_tensors_and_ops_go_to_the_others():
    harness = harness_with(2)
    harness.define(OP, ZEROS)
    leave(harness)
    harness.create(C)
    harness.tell(run(OP, (), (D,)))
    assert (harness.layout(C), harness.layout(D)) == ("- on 0", "- on 0")


def test_a_tensor_that_a_message_on_its_way_puts_there_moves_too():
    harness = harness_with(2)
    sent = leave(harness)
    harness.redistribute(A, C, "x")
    drained = answer(harness, sent)
    assert harness.layout(C) == "x on 0"
    assert is_dismissed(answer(harness, drained))


def test_a_tensor_that_a_query_resizes_moves_after_its_answer():
    harness = harness_with(2)
    harness.define(OP, RESIZE_)
    harness.tell(query(OP, (B, A), (C,)))
    assert C in harness.state.may_resize
    where = harness.layout(C)
    leave(harness, harness.state.tensors[C].spec.mesh.workers[0])
    assert harness.layout(C) == where


def test_a_closed_worker_is_as_good_as_lost_for_those_that_name_it():
    harness = sharded_harness(2)
    sent = leave(harness)
    closed = answer(harness, sent)
    harness.redistribute(A, B, "x", PAIR)
    (lost,) = answers(harness.tell(FetchTensor(REQUEST, B)))
    assert lost == Lost(REQUEST, 1, 1001, f"left: {TOLD}", "")
    assert asked(harness.tell(Synchronize(REQUEST + 1)))[1] == (0,)
    assert is_dismissed(answer(harness, closed))


def test_copies_on_a_worker_that_leaves_are_dropped():
    harness = harness_with(3)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, B), (C,)))
    assert list(harness.state.copies) == [B]
    drain(harness, 0)
    assert not harness.state.copies and harness.layout(B) == "- on 1"


def test_a_worker_that_is_lost_meanwhile_is_not_waited_for():
    harness = sharded_harness(3)
    request, workers = asked(leave(harness))
    assert workers == (0, 1, 2)
    for worker in (0, 1):
        assert harness.report(worker, Synchronized(request)) == []
    for _ in range(worker_drains.CHECKS):
        assert harness.dispatcher.note_process_check() == []
    harness.lose(2)
    sent = [harness.dispatcher.note_process_check() for _ in range(worker_drains.CHECKS)]
    assert asked(sent[-1])[1] == (1,)


def test_a_worker_that_is_killed_before_it_has_moved_all_is_lost():
    harness = sharded_harness(3)
    leave(harness)
    assert [kind(each) for each in answers(harness.lose(1))] == ["Lost"]


def test_the_last_worker_ends_at_once():
    harness = harness_with(1)
    assert is_dismissed(leave(harness, 0), 0)
    (lost,) = answers(harness.report(0, Goodbye(TOLD)))
    assert sum(line.tensors for line in lost.lines) == 2


def test_all_workers_may_leave_at_the_same_time():
    harness = sharded_harness(2)
    sent = leave(harness)
    assert is_dismissed(leave(harness, 0), 0)
    assert is_dismissed(answer(harness, sent))
    (lost,) = answers(harness.report(0, Goodbye(TOLD)))
    assert [line.tensors for line in lost.lines] == [1], "and nobody is told of worker 1 as of a new one"


def test_an_answer_that_comes_after_the_worker_has_gone_is_no_error():
    harness = harness_with(2)
    request, _ = asked(leave(harness))
    harness.lose(1)
    assert harness.report(0, Synchronized(request)) == []


def test_a_worker_that_was_not_asked_is_refused():
    harness = harness_with(2)
    request, _ = asked(leave(harness))
    with pytest.raises(ProtocolError, match="was not asked"):
        harness.report(0, Synchronized(request + 1))


def test_inputs_of_an_op_without_a_rule_are_gathered_elsewhere():
    harness = sharded_harness(3)
    harness.define(OP, NO_RULE)
    drain(harness)
    harness.tell(run(OP, (A,), (B,)))
    assert 1 not in harness.state.tensors[B].spec.mesh and over("x") is not harness.state.tensors[A].spec
