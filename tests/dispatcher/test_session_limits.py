"""Limits of a session: what is over them is refused before a command is sent, and the session goes on."""

import pytest

from gt.core.messages import BeginModule, Failed, FreeTensors, OpFailed, Queried, RunOp
from gt.core.settings import Limits
from gt.dispatcher.dispatcher import Dispatcher
from tests.dispatcher.invariants import check_invariants
from tests.dispatcher_harness import (
    OP,
    OP2,
    REQUEST,
    A,
    B,
    C,
    D,
    DispatcherHarness,
    E,
    answers,
    query,
    run,
    told,
)
from tests.records import ADD, ADD_, NO_RULE, NONZERO, SMALL, own

SIZE = SMALL.nbytes  # 16 bytes


def limited(workers=1, **limits):
    harness = DispatcherHarness(0)
    harness.dispatcher = Dispatcher(limits=Limits(**limits))
    harness.state = harness.dispatcher.state
    for _ in range(workers):
        harness.dispatcher.make_ready(harness.dispatcher.join_worker("cpu", "here", 1000)[0])
    harness.dispatcher.take()
    harness.open()
    harness.open()
    return harness


def refusals(outgoing):
    return [answer.failure for answer in answers(outgoing) if isinstance(answer, OpFailed | Failed)]


def test_an_upload_over_the_limit_is_refused_and_freeing_helps():
    harness = limited(bytes=2 * SIZE)
    harness.create(A, B)
    refused = harness.create(C)
    (failure,) = refusals(refused)
    assert told(refused) == ["client: OpFailed"] and failure.kind == "LimitError"
    assert "holds 32 B on worker 0, and 32 B is its limit; the op needs 16 B more there" in failure.message
    harness.tell(FreeTensors((A,)))
    assert not refusals(harness.create(D))


def test_an_op_over_the_limit_sends_no_command_and_its_result_has_no_value():
    harness = limited(bytes=2 * SIZE)
    harness.create(A, B)
    harness.define(OP, ADD)
    refused = harness.tell(run(OP, (A, B), (C,), site=7))
    assert told(refused) == ["client: OpFailed"]
    (failure,) = refusals(refused)
    assert (failure.op, failure.site, failure.worker) == ("aten.add.Tensor", 7, -1)
    assert C in harness.state.missing
    harness.define(OP2, ADD_)
    assert told(harness.tell(run(OP2, (A, B), (D,))))[-1].endswith("op2(A, B) -> D")  # in place: no new memory


def test_the_limit_of_one_session_is_not_that_of_another():
    harness = limited(bytes=2 * SIZE, tensors=2)
    harness.create(A, B)
    assert refusals(harness.create(C))
    assert not refusals(harness.create(own(1, 2), own(2, 2), session=2))
    assert refusals(harness.create(own(3, 2), session=2))


def test_a_session_holds_at_most_so_many_tensors():
    harness = limited(tensors=3)
    harness.create(A, B)
    harness.define(OP, ADD)
    assert not refusals(harness.tell(run(OP, (A, B), (C,))))
    (failure,) = refusals(harness.tell(run(OP, (A, B), (D,))))
    assert "this session holds 3 tensors, and 3 is its limit" in failure.message
    harness.tell(FreeTensors((C, D)))
    assert not refusals(harness.tell(run(OP, (A, B), (E,))))


def test_bytes_are_counted_on_each_worker():
    harness = limited(2, bytes=2 * SIZE)
    harness.create(A, B, C, D)  # two on each worker
    (failure,) = refusals(harness.create(E))
    assert "holds 32 B on worker 0" in failure.message


def half_full(limit):
    """B over two workers, 8 bytes on each, and 16 bytes more on worker 0."""
    harness = limited(2, bytes=limit)
    harness.create(A)
    harness.redistribute(A, B, "x")
    harness.define(OP, NO_RULE)
    return harness


def test_copies_of_the_session_are_dropped_before_it_is_refused():
    harness = half_full(4 * SIZE)
    harness.tell(run(OP, (B,), (C,)))  # gathers B: a copy of 16 bytes on both workers
    assert B in harness.state.copies
    assert not refusals(harness.create(D))
    harness.tell(FreeTensors((C,)))
    sent = harness.create(E, own(6), own(7))
    assert B not in harness.state.copies and any(": free c" in line for line in told(sent))
    assert not refusals(sent)


def test_a_copy_that_may_not_be_made_fails_its_op():
    harness = half_full(24)
    refused = harness.tell(run(OP, (B,), (C,)))
    assert told(refused) == ["client: OpFailed"]
    assert C in harness.state.missing and B in harness.state.tensors and not harness.state.copies


def test_a_query_over_the_limit_is_answered():
    harness = half_full(24)
    harness.define(OP2, NONZERO)
    (failure,) = refusals(harness.tell(query(OP2, (B,), first=own(1 << 39))))
    assert (failure.kind, failure.origin) == ("LimitError", REQUEST)


@pytest.mark.parametrize("limits", [{"bytes": 2 * SIZE}, {"tensors": 2}])
def test_results_of_unknown_sizes_exceed_a_limit_once(limits):
    harness = limited(**limits)
    harness.create(A, B)
    harness.define(OP, NONZERO)
    assert not refusals(harness.tell(query(OP, (A,), first=own(1 << 38))))
    harness.report(0, Queried(REQUEST, (SMALL,), ()))
    (failure,) = refusals(harness.tell(query(OP, (A,), first=own(1 << 39))))
    assert (failure.kind, failure.origin) == ("LimitError", REQUEST)
    harness.tell(FreeTensors((own(1 << 38),)))
    assert not refusals(harness.tell(query(OP, (A,), first=own(1 << 39))))


def test_gathers_ahead_are_left_out_over_the_limit():
    harness = limited(2, bytes=SIZE)
    harness.create(A)
    harness.redistribute(A, B, "x")
    harness.tell(BeginModule(1, (B,), 2, (), 0))
    assert not harness.state.copies


@pytest.mark.parametrize("limits", [{"bytes": 1 << 20}, {"tensors": 100}, {"bytes": 4 * SIZE, "tensors": 4}])
def test_counts_follow_ops_writes_frees_losses_and_ends(limits):
    """`check_invariants` compares the counts with the tensors after every message."""
    harness = limited(2, **limits)
    harness.create(A, B)
    harness.redistribute(A, C, "x")
    harness.define(OP, ADD)
    harness.define(OP2, ADD_)
    for number in range(20, 30):
        harness.tell(RunOp(OP, (A, B), (own(number),), (), 0, 0))
        if number % 2:
            harness.tell(FreeTensors((own(number),)))
    harness.tell(run(OP2, (A, C), (D,)))
    harness.lose(1)
    harness.close(1)
    check_invariants(harness.state)
    assert list(harness.state.uses) == [2] and harness.state.uses[2].tensors == 0
