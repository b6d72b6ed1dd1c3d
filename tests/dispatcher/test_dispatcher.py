"""The office as list comparisons: messages in, messages out, no sockets. The state is checked after every message."""

import msgspec
import pytest

from gt.core.errors import ProtocolError
from gt.core.messages import (
    DefineOp,
    Failed,
    Fetched,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Located,
    LocateTensor,
    Lost,
    OpFailed,
    Queried,
    QueryOp,
    Rejected,
    RunOp,
    Segment,
    Synchronize,
    Synchronized,
    WorkerCreateTensor,
    WorkerDefineProgram,
    WorkerEndSession,
    WorkerFetchTensor,
)
from gt.dispatcher.outgoing import ToClient, ToWorkers
from gt.dispatcher.planner import plan_move
from tests.dispatcher_harness import (
    OP,
    OP2,
    REQUEST,
    REQUEST2,
    A,
    B,
    C,
    D,
    DispatcherHarness,
    E,
    answers,
    at,
    create,
    desk_with,
    given,
    kind,
    query,
    run,
    told,
)
from tests.records import ADD, ADD_, FAILURE, LARGE, NONZERO, RESIZE_, SMALL, ZEROS, own, signature


def test_an_op_is_not_defined_anew():
    """The workers would go on with the old one, which may take and give other tensors."""
    desk = desk_with()
    desk.define(OP, ADD)
    (answer,) = answers(desk.define(OP, ADD_))
    assert isinstance(answer, Rejected) and "is defined already" in answer.reason
    assert told(desk.tell(run(OP, (A, B), (C,)))) == ["0: define op", "0: op(A, B) -> C"]
    desk.tell(ForgetOps((OP,)))
    assert answers(desk.define(OP, ADD_)) == []


def test_an_op_is_defined_on_a_worker_once():
    desk = desk_with()
    desk.define(OP, ADD)
    first = desk.tell(run(OP, (A, B), (C,), (2, 0.5), 7))
    second = desk.tell(run(OP, (A, C), (D,)))
    assert first == [
        ToWorkers((0,), DefineOp(OP, ADD)),
        ToWorkers((0,), RunOp(OP, (A, B), (C,), (2, 0.5), 0, 7)),
    ]
    assert second == [ToWorkers((0,), RunOp(OP, (A, C), (D,), (), 0, 0))]


def test_an_op_is_defined_on_each_worker_that_runs_it():
    desk = desk_with(2)
    desk.define(OP, ADD)
    sent = desk.tell(run(OP, (A, A), (C,)), run(OP, (B, B), (D,)))
    assert [out.workers for out in sent if isinstance(out.command, DefineOp)] == [(0,), (1,)]


def test_defining_an_op_tells_no_worker():
    assert desk_with().define(OP, ADD) == []


def test_outputs_are_placed_where_the_op_ran():
    desk = desk_with(2)
    desk.define(OP, signature("aten.split.Tensor", 1, (SMALL, LARGE)))
    desk.tell(run(OP, (B,), (C, D)))
    assert [desk.state.tensors[ident] for ident in (C, D)] == [(SMALL, at(1), 16, False), (LARGE, at(1), 4096, False)]


def test_inputs_apart_are_moved_by_both_ends_before_the_op():
    desk = desk_with(2)
    desk.define(OP, ADD)
    copy, code = given(1), given(2)
    move = plan_move(SMALL, at(1), at(0)).program
    assert desk.tell(run(OP, (A, B), (C,), site=7)) == [
        ToWorkers((0,), DefineOp(OP, ADD)),
        ToWorkers((1, 0), WorkerDefineProgram(code, "redistribute", move)),
        ToWorkers((1, 0), RunOp(code, (B,), (copy,), (), 0, 7), meet=True),
        ToWorkers((0,), RunOp(OP, (A, copy), (C,), (), 0, 7)),
    ]
    assert desk.state.tensors[B].spec is at(1)
    assert desk.state.copies == {B: {at(0): copy}}


def test_a_copy_is_used_again():
    desk = desk_with(2)
    desk.define(OP, ADD)
    desk.tell(run(OP, (A, B), (C,)))
    assert told(desk.tell(run(OP, (A, B), (D,)))) == ["0: op(A, c1) -> D"]


def test_a_move_is_defined_once():
    desk = desk_with(3)
    desk.create(C, D)  # on workers 2 and 0
    desk.define(OP, ADD)
    assert told(desk.tell(run(OP, (D, B), (E,)))) == [
        "0: define op",
        "1 0: define c2: redistribute",
        "1+0: c2(B) -> c1",
        "0: op(D, c1) -> E",
    ]
    desk.tell(FreeTensors((B,)))
    desk.tell(create(B))  # again on worker 1, which holds the fewest bytes
    assert told(desk.tell(run(OP, (D, B), (own(6),)))) == ["1+0: c2(B) -> c3", "0: op(D, c3) -> 6"]


def test_a_write_goes_on_under_a_new_id():
    desk = desk_with()
    desk.define(OP, ADD_)
    desk.tell(run(OP, (A, B), (C,)))
    assert set(desk.state.tensors) == {B, C} == set(desk.state.held_by(1))
    assert desk.state.meta(C) == SMALL


def test_a_write_frees_the_copies_of_what_was_there():
    desk = desk_with(2)
    desk.define(OP, ADD)
    desk.define(OP2, ADD_)
    desk.tell(run(OP, (A, B), (C,)))  # leaves a copy of B on worker 0
    assert told(desk.tell(run(OP2, (B, B), (D,)))) == ["1: define op2", "1: op2(B, B) -> D", "0: free c1"]
    assert desk.state.tensors[D].spec is at(1)
    assert desk.state.copies == {}


def test_an_op_with_outputs_and_writes_names_the_new_versions_last():
    desk = desk_with()
    desk.define(OP, signature("aten.batch_norm", 2, (LARGE,), writes=(1,)))
    desk.tell(run(OP, (A, B), (C, D)))
    assert (desk.state.meta(C), desk.state.meta(D)) == (LARGE, SMALL)
    assert B not in desk.state.tensors


def test_an_op_without_inputs_runs_on_the_least_loaded_worker():
    desk = desk_with(2)
    desk.create(C, meta=LARGE)
    desk.define(OP, ZEROS)
    desk.tell(run(OP, (), (D,)))
    assert [desk.state.tensors[ident].spec for ident in (C, D)] == [at(0), at(1)]


def test_an_op_without_inputs_is_defined_wherever_it_runs():
    desk = desk_with(2)
    desk.define(OP, ZEROS)
    assert told(desk.tell(*[run(OP, (), (ident,)) for ident in (C, D, E)])) == [
        "0: define op",
        "0: op() -> C",
        "1: define op",
        "1: op() -> D",
        "0: op() -> E",
    ]


def test_all_that_an_op_writes_to_comes_to_where_the_first_of_it_is():
    desk = desk_with(2)
    desk.define(OP, signature("aten.aminmax.out", 2, writes=(0, 1)))
    assert told(desk.tell(run(OP, (A, B), (C, D)))) == [
        "1 0: define c2: redistribute",
        "1+0: c2(B) -> c1",
        "1: free B",
        "0: define c3: redistribute",
        "0: c3(c1) -> B",
        "0: free c1",
        "0: define op",
        "0: op(A, B) -> C, D",
    ]
    assert [desk.layout(ident) for ident in (C, D)] == ["- on 0", "- on 0"]


def test_ops_that_are_forgotten_are_forgotten_where_they_are_known():
    desk = desk_with(2)
    desk.define(OP, ADD)
    desk.define(OP2, ADD)
    desk.tell(run(OP, (A, A), (C,)), run(OP2, (B, B), (D,)))
    assert desk.tell(ForgetOps((OP,))) == [ToWorkers((0,), ForgetOps((OP,)))]
    assert desk.state.workers[0].known == set() and desk.state.workers[1].known == {OP2}


def test_moves_are_forgotten_with_ops():
    desk = desk_with(2)
    desk.define(OP, ADD)
    desk.tell(run(OP, (A, B), (C,)))
    assert told(desk.tell(ForgetOps((OP,)))) == ["1 0: forget c2", "0: forget op"]
    desk.define(OP2, ADD)
    assert told(desk.tell(FreeTensors((B,)), create(B), run(OP2, (A, B), (D,))))[-3:] == [
        "1 0: define c4: redistribute",
        "1+0: c4(B) -> c3",
        "0: op2(A, c3) -> D",
    ]


def test_an_op_that_was_forgotten_is_unknown():
    desk = desk_with()
    desk.define(OP, ADD)
    (answer,) = answers(desk.tell(ForgetOps((OP,)), run(OP, (A, B), (C,))))
    assert isinstance(answer, Rejected)


def test_host_data_goes_to_the_least_loaded_worker_with_its_bytes():
    desk = desk_with(2)
    desk.create(C)
    buffer = b"0123456789abcdef"
    assert desk.tell(create(D, site=3), buffers=[buffer]) == [
        ToWorkers((1,), WorkerCreateTensor(D, SMALL, Segment("", 16), 3), buffer)
    ]


def test_freed_tensors_are_freed_by_every_holder():
    desk = desk_with(2)
    desk.define(OP, ADD)
    desk.tell(run(OP, (A, B), (C,)))
    assert told(desk.tell(FreeTensors((A, B)))) == ["0: free A, c1", "1: free B"]
    assert set(desk.state.tensors) == {C} == set(desk.state.held_by(1))
    assert desk.state.copies == {}


def test_freeing_twice_is_harmless():
    desk = desk_with()
    desk.tell(FreeTensors((A,)))
    assert desk.tell(FreeTensors((A,))) == []


def test_a_fetch_is_answered_by_the_worker_that_holds_the_tensor():
    desk = desk_with(2)
    fetched = Fetched(REQUEST, Segment("", 16))
    assert desk.tell(FetchTensor(REQUEST, B)) == [ToWorkers((1,), WorkerFetchTensor(REQUEST, B, True))]
    assert desk.report(1, fetched, b"0123456789abcdef") == [ToClient(1, fetched, b"0123456789abcdef")]
    with pytest.raises(ProtocolError, match="worker 1 was not asked for request 200"):
        desk.report(1, fetched, b"again")


@pytest.mark.parametrize(("client", "worker", "shared"), [("here", "here", True), ("here", "there", False)])
def test_memory_is_shared_on_one_machine_only(client, worker, shared):
    desk = DispatcherHarness(0)
    desk.join(host=worker)
    desk.open(host=client)
    desk.create(A)
    assert desk.tell(FetchTensor(REQUEST, A)) == [ToWorkers((0,), WorkerFetchTensor(REQUEST, A, shared))]


def test_a_fetch_that_fails_is_answered_so():
    desk = desk_with()
    desk.tell(FetchTensor(REQUEST, A))
    assert desk.report(0, Failed(REQUEST, FAILURE)) == [ToClient(1, Failed(REQUEST, FAILURE))]


def test_the_results_of_a_query_are_placed_where_it_ran():
    desk = desk_with(2)
    desk.define(OP, NONZERO)
    queried = Queried(REQUEST, (LARGE, 3, SMALL), ())
    sent = desk.tell(query(OP, (B,)))
    assert sent[-1] == ToWorkers((1,), QueryOp(REQUEST, OP, (B,), (), D, (), 0, 0))
    assert desk.report(1, queried) == [ToClient(1, queried)]
    assert [desk.state.tensors[ident][:2] for ident in (D, E)] == [(LARGE, at(1)), (SMALL, at(1))]
    assert set(desk.state.held_by(1)) == {A, B, D, E}


def test_a_query_may_resize_what_it_writes():
    desk = desk_with()
    desk.define(OP, RESIZE_)
    desk.tell(query(OP, (A, B), (C,)))
    assert desk.state.meta(C) == SMALL and A not in desk.state.tensors
    desk.report(0, Queried(REQUEST, (), (LARGE,)))
    assert desk.state.meta(C) == LARGE
    assert set(desk.state.held_by(1)) == {B, C}


def test_a_tensor_is_located_without_asking_a_worker():
    desk = desk_with(2)
    desk.define(OP, ADD)
    desk.tell(run(OP, (A, B), (C,)))
    assert desk.tell(LocateTensor(REQUEST, B)) == [ToClient(1, Located(REQUEST, at(1).record()))]


def test_synchronize_waits_for_every_worker():
    desk = desk_with(3)
    assert desk.tell(Synchronize(REQUEST)) == [ToWorkers((0, 1, 2), Synchronize(REQUEST))]
    assert desk.report(0, Synchronized(REQUEST)) == []
    assert desk.report(2, Synchronized(REQUEST)) == []
    assert desk.report(1, Synchronized(REQUEST)) == [ToClient(1, Synchronized(REQUEST))]


def test_a_failed_op_is_told_to_its_session():
    desk = desk_with()
    desk.open()
    desk.create(own(1, 2), session=2)
    failed = OpFailed(2, msgspec.structs.replace(FAILURE, origin=own(1, 2)))
    assert desk.report(0, failed) == [ToClient(2, failed)]


@pytest.mark.parametrize(
    "instruction",
    [
        run(OP, (A, E), (C,)),
        run(OP2, (A, B), (C,)),
        query(OP, (A, E)),
        query(OP2, (A,)),
        FetchTensor(REQUEST, E),
        LocateTensor(REQUEST, E),
    ],
    ids=kind,
)
def test_an_unknown_id_is_rejected(instruction):
    desk = desk_with()
    desk.define(OP, ADD)
    (answer,) = answers(desk.tell(instruction))
    assert isinstance(answer, Rejected)
    assert answer.request == getattr(instruction, "request", 0)
    assert type(instruction).__name__ in answer.reason


def test_what_follows_a_rejected_instruction_is_done():
    desk = desk_with()
    batch = [FetchTensor(REQUEST, E), LocateTensor(REQUEST2, A)]
    sent = desk.office.instruct(1, batch, [])
    assert answers(sent)[1:] == [Located(REQUEST2, at(0).record())]


BOTH = signature("aten.x", 2, writes=(0, 1))
MISFITS = {
    "an output is missing": (ADD, run(OP, (A, B), ())),
    "an output too many": (ADD, run(OP, (A, B), (C, D))),
    "the new version is missing": (ADD_, run(OP, (A, B), ())),
    "a new version too many": (ADD_, run(OP, (A, B), (C, D))),
    "nothing to write to": (ADD_, run(OP, (), (C,))),
    "writes beyond its inputs": (signature("aten.x", 2, writes=(2,)), run(OP, (A, B), (C,))),
    "writes the same twice": (signature("aten.x", 2, writes=(0, 0)), run(OP, (A, B), (C, D))),
    "the new version of a query is missing": (RESIZE_, query(OP, (A, B), ())),
    "a new version of a query too many": (RESIZE_, query(OP, (A, B), (C, D))),
    "two new versions of one tensor": (BOTH, run(OP, (A, A), (C, D))),
    "two new versions of one tensor by a query": (BOTH, query(OP, (A, A), (C, D))),
    "one id for two new versions": (BOTH, query(OP, (A, B), (C, C))),
}


@pytest.mark.parametrize(("defined", "instruction"), MISFITS.values(), ids=MISFITS.keys())
def test_an_op_that_does_not_fit_its_signature_is_rejected(defined, instruction):
    desk = desk_with()
    desk.define(OP, defined)
    (answer,) = answers(desk.tell(instruction))
    assert isinstance(answer, Rejected)
    assert desk.state.tensors.keys() == {A, B}, "what is rejected changes nothing"


def test_two_new_versions_of_one_tensor_are_rejected_where_the_op_has_a_plan_too():
    desk = desk_with()
    desk.define(OP, BOTH)
    desk.tell(run(OP, (A, B), (C, D)))
    (answer,) = answers(desk.tell(run(OP, (C, C), (A, B))))
    assert isinstance(answer, Rejected) and "one tensor at two places" in answer.reason


def test_an_op_on_a_lost_and_an_unknown_tensor_is_refused():
    desk = desk_with(2)
    desk.define(OP, ADD_)
    desk.lose(1)
    desk.tell(run(OP, (E, B), (C,)))
    (answer,) = answers(desk.tell(FetchTensor(REQUEST, C)))
    assert isinstance(answer, Lost | Rejected)


def test_the_end_of_a_session_frees_what_it_held():
    desk = desk_with(2)
    desk.define(OP, ADD)
    desk.tell(run(OP, (A, B), (C,)))
    assert desk.close() == [ToWorkers((0, 1), WorkerEndSession(1))]
    assert (desk.state.tensors, desk.state.copies, desk.state.sessions) == ({}, {}, {})
    assert not any(worker.known for worker in desk.state.workers.values())
    assert not any(desk.state.loads.values())


def test_a_goodbye_ends_the_session():
    desk = desk_with()
    assert desk.tell(Goodbye()) == [ToWorkers((0,), WorkerEndSession(1))]
    assert desk.state.sessions == {}


def test_a_session_ends_once():
    desk = desk_with()
    desk.close()
    assert desk.close() == []


def test_nothing_is_done_after_a_goodbye():
    desk = desk_with()
    sent = desk.office.instruct(1, [Goodbye(), create(C)], [b"0123456789abcdef"])
    assert sent == [ToWorkers((0,), WorkerEndSession(1))]
    assert desk.state.tensors == {}


def test_a_report_to_a_session_that_has_ended_goes_nowhere():
    desk = desk_with()
    desk.define(OP, NONZERO)
    desk.tell(query(OP, (A,)), Synchronize(REQUEST2))
    desk.close()
    assert desk.report(0, Queried(REQUEST, (SMALL,), ())) == []
    assert desk.report(0, Synchronized(REQUEST2)) == []
    assert desk.report(0, OpFailed(1, FAILURE)) == []
    assert (desk.state.tensors, desk.state.pending) == ({}, {})


def test_the_end_of_a_session_leaves_the_others_alone():
    desk = desk_with()
    other = desk.open()
    theirs = own(1, other)
    desk.create(theirs, session=other)
    desk.define(own(100, other), ADD, session=other)
    desk.tell(RunOp(own(100, other), (theirs, theirs), (own(2, other),), (), 0, 0), session=other)
    desk.close(1)
    assert set(desk.state.tensors) == {theirs, own(2, other)}
    assert desk.state.workers[0].known == {own(100, other)}


def test_sessions_are_numbered_anew():
    desk = DispatcherHarness()
    first = desk.open()
    desk.close(first)
    assert desk.open() != first


def test_an_answer_goes_to_the_session_that_asked():
    desk = desk_with()
    other = desk.open()
    desk.tell(Synchronize(REQUEST))
    desk.tell(Synchronize(own(200, other)), session=other)
    assert desk.report(0, Synchronized(own(200, other))) == [ToClient(2, Synchronized(own(200, other)))]
    assert desk.report(0, Synchronized(REQUEST)) == [ToClient(1, Synchronized(REQUEST))]
