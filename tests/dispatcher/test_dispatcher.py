"""The dispatcher as list comparisons: messages in, messages out. The state is checked after every message."""

import msgspec

from gt.core.messages import (
    ByteRange,
    DefineOp,
    ForgetOps,
    FreeTensors,
    Goodbye,
    OpFailed,
    Queried,
    Rejected,
    RunOp,
    Synchronize,
    Synchronized,
    WorkerCreateTensor,
    WorkerDefineProgram,
    WorkerEndSession,
)
from gt.dispatcher.message_queue import ToClient, ToWorkers
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
    given,
    harness_with,
    query,
    run,
    told,
)
from tests.records import ADD, ADD_, FAILURE, LARGE, NONZERO, SMALL, ZEROS, meta, own, signature


def test_an_op_cannot_be_defined_twice():
    """The workers would keep the old definition, which may have other inputs and outputs."""
    harness = harness_with()
    harness.define(OP, ADD)
    (answer,) = answers(harness.define(OP, ADD_))
    assert isinstance(answer, Rejected) and "is defined already" in answer.reason
    assert told(harness.tell(run(OP, (A, B), (C,)))) == ["0: define op", "0: op(A, B) -> C"]
    harness.tell(ForgetOps((OP,)))
    assert answers(harness.define(OP, ADD_)) == []


def test_an_op_is_defined_on_a_worker_once():
    harness = harness_with()
    harness.define(OP, ADD)
    first = harness.tell(run(OP, (A, B), (C,), (2, 0.5), 7))
    second = harness.tell(run(OP, (A, C), (D,)))
    assert first == [
        ToWorkers((0,), DefineOp(OP, ADD)),
        ToWorkers((0,), RunOp(OP, (A, B), (C,), (2, 0.5), 0, 7)),
    ]
    assert second == [ToWorkers((0,), RunOp(OP, (A, C), (D,), (), 0, 0))]


def test_an_op_is_defined_on_each_worker_that_runs_it():
    harness = harness_with(2)
    harness.define(OP, ADD)
    sent = harness.tell(run(OP, (A, A), (C,)), run(OP, (B, B), (D,)))
    assert [out.workers for out in sent if isinstance(out.command, DefineOp)] == [(0,), (1,)]


def test_defining_an_op_tells_no_worker():
    assert harness_with().define(OP, ADD) == []


def test_outputs_are_placed_where_the_op_ran():
    harness = harness_with(2)
    harness.define(OP, signature("aten.split.Tensor", 1, (SMALL, LARGE)))
    harness.tell(run(OP, (B,), (C, D)))
    assert [harness.state.tensors[ident] for ident in (C, D)] == [
        (SMALL, at(1), 16, False, False),
        (LARGE, at(1), 4096, False, False),
    ]


def test_inputs_apart_are_moved_by_both_ends_before_the_op():
    harness = harness_with(2)
    harness.define(OP, ADD)
    copy, op_id = given(1), given(2)
    move = plan_move(SMALL, at(1), at(0)).program
    assert harness.tell(run(OP, (A, B), (C,), site=7)) == [
        ToWorkers((0,), DefineOp(OP, ADD)),
        ToWorkers((1, 0), WorkerDefineProgram(op_id, "redistribute", move)),
        ToWorkers((1, 0), RunOp(op_id, (B,), (copy,), (), 0, 7), exchanges=True),
        ToWorkers((0,), RunOp(OP, (A, copy), (C,), (), 0, 7)),
    ]
    assert harness.state.tensors[B].spec is at(1)
    assert harness.state.copies == {B: {at(0): copy}}


def test_a_copy_is_used_again():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, B), (C,)))
    assert told(harness.tell(run(OP, (A, B), (D,)))) == ["0: op(A, c1) -> D"]


def test_a_move_is_defined_once():
    harness = harness_with(3)
    harness.create(C, D)  # on workers 2 and 0
    harness.define(OP, ADD)
    assert told(harness.tell(run(OP, (D, B), (E,)))) == [
        "0: define op",
        "1 0: define c2: redistribute",
        "1+0: c2(B) -> c1",
        "0: op(D, c1) -> E",
    ]
    harness.tell(FreeTensors((B,)))
    harness.tell(create(B))  # again on worker 1, which holds the fewest bytes
    assert told(harness.tell(run(OP, (D, B), (own(6),)))) == ["1+0: c2(B) -> c3", "0: op(D, c3) -> 6"]


def test_a_write_goes_on_under_a_new_id():
    harness = harness_with()
    harness.define(OP, ADD_)
    harness.tell(run(OP, (A, B), (C,)))
    assert set(harness.state.tensors) == {B, C} == set(harness.state.tensors_of(1))
    assert harness.state.meta(C) == SMALL


def test_a_write_frees_the_copies_of_its_target():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.define(OP2, ADD_)
    harness.tell(run(OP, (A, B), (C,)))  # leaves a copy of B on worker 0
    assert told(harness.tell(run(OP2, (B, B), (D,)))) == ["1: define op2", "1: op2(B, B) -> D", "0: free c1"]
    assert harness.state.tensors[D].spec is at(1)
    assert harness.state.copies == {}


def test_an_op_with_outputs_and_writes_names_the_new_versions_last():
    harness = harness_with()
    harness.define(OP, signature("aten.batch_norm", 2, (LARGE,), writes=(1,)))
    harness.tell(run(OP, (A, B), (C, D)))
    assert (harness.state.meta(C), harness.state.meta(D)) == (LARGE, SMALL)
    assert B not in harness.state.tensors


def test_one_that_has_joined_last_does_not_get_all_that_follows():
    harness = harness_with(2)
    harness.join()
    harness.create(C, D)
    harness.create(E, own(6), own(7), meta=meta(1 << 19))
    harness.create(own(8))
    placed = [harness.layout(ident) for ident in (A, B, C, D, E, own(6), own(7), own(8))]
    assert placed == [f"- on {worker}" for worker in (0, 1, 0, 1, 0, 1, 2, 2)]


def test_an_op_without_inputs_runs_on_the_least_loaded_worker():
    harness = harness_with(2)
    harness.create(C, meta=LARGE)
    harness.define(OP, ZEROS)
    harness.tell(run(OP, (), (D,)))
    assert [harness.state.tensors[ident].spec for ident in (C, D)] == [at(0), at(1)]


def test_an_op_without_inputs_is_defined_wherever_it_runs():
    harness = harness_with(2)
    harness.define(OP, ZEROS)
    assert told(harness.tell(*[run(OP, (), (ident,)) for ident in (C, D, E)])) == [
        "0: define op",
        "0: op() -> C",
        "1: define op",
        "1: op() -> D",
        "0: op() -> E",
    ]


def test_written_inputs_move_to_the_mesh_of_the_first_one():
    harness = harness_with(2)
    harness.define(OP, signature("aten.aminmax.out", 2, writes=(0, 1)))
    assert told(harness.tell(run(OP, (A, B), (C, D)))) == [
        "1 0: define c2: redistribute",
        "1+0: c2(B) -> c1",
        "1: free B",
        "0: define c3: redistribute",
        "0: c3(c1) -> B",
        "0: free c1",
        "0: define op",
        "0: op(A, B) -> C, D",
    ]
    assert [harness.layout(ident) for ident in (C, D)] == ["- on 0", "- on 0"]


def test_forgotten_ops_are_forgotten_on_the_workers_that_know_them():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.define(OP2, ADD)
    harness.tell(run(OP, (A, A), (C,)), run(OP2, (B, B), (D,)))
    assert harness.tell(ForgetOps((OP,))) == [ToWorkers((0,), ForgetOps((OP,)))]
    assert harness.state.workers[0].known_ops == set() and harness.state.workers[1].known_ops == {OP2}


def test_moves_are_forgotten_with_ops():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, B), (C,)))
    assert told(harness.tell(ForgetOps((OP,)))) == ["1 0: forget c2", "0: forget op"]
    harness.define(OP2, ADD)
    assert told(harness.tell(FreeTensors((B,)), create(B), run(OP2, (A, B), (D,))))[-3:] == [
        "1 0: define c4: redistribute",
        "1+0: c4(B) -> c3",
        "0: op2(A, c3) -> D",
    ]


def test_an_op_that_was_forgotten_is_unknown():
    harness = harness_with()
    harness.define(OP, ADD)
    (answer,) = answers(harness.tell(ForgetOps((OP,)), run(OP, (A, B), (C,))))
    assert isinstance(answer, Rejected)


def test_host_data_goes_to_the_least_loaded_worker_with_its_bytes():
    harness = harness_with(2)
    harness.create(C)
    buffer = b"0123456789abcdef"
    assert harness.tell(create(D, site=3), buffers=[buffer]) == [
        ToWorkers((1,), WorkerCreateTensor(D, SMALL, ByteRange("", 16), 3), buffer)
    ]


def test_freed_tensors_are_freed_by_every_holder():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, B), (C,)))
    assert told(harness.tell(FreeTensors((A, B)))) == ["0: free A, c1", "1: free B"]
    assert set(harness.state.tensors) == {C} == set(harness.state.tensors_of(1))
    assert harness.state.copies == {}


def test_freeing_twice_is_harmless():
    harness = harness_with()
    harness.tell(FreeTensors((A,)))
    assert harness.tell(FreeTensors((A,))) == []


def test_a_failed_op_is_told_to_its_session():
    harness = harness_with()
    harness.open()
    harness.create(own(1, 2), session=2)
    failed = OpFailed(2, msgspec.structs.replace(FAILURE, origin=own(1, 2)))
    assert harness.report(0, failed) == [ToClient(2, failed)]


def test_the_end_of_a_session_frees_its_tensors():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, B), (C,)))
    assert harness.close() == [ToWorkers((0, 1), WorkerEndSession(1))]
    assert (harness.state.tensors, harness.state.copies, harness.state.sessions) == ({}, {}, {})
    assert not any(worker.known_ops for worker in harness.state.workers.values())
    assert not any(harness.state.bytes_on.values())


def test_a_goodbye_ends_the_session():
    harness = harness_with()
    assert harness.tell(Goodbye()) == [ToWorkers((0,), WorkerEndSession(1))]
    assert harness.state.sessions == {}


def test_a_session_ends_once():
    harness = harness_with()
    harness.close()
    assert harness.close() == []


def test_instructions_after_a_goodbye_are_ignored():
    harness = harness_with()
    sent = harness.dispatcher.instruct(1, [Goodbye(), create(C)], [b"0123456789abcdef"])
    assert sent == [ToWorkers((0,), WorkerEndSession(1))]
    assert harness.state.tensors == {}


def test_a_report_to_a_session_that_has_ended_goes_nowhere():
    harness = harness_with()
    harness.define(OP, NONZERO)
    harness.tell(query(OP, (A,)), Synchronize(REQUEST2))
    harness.close()
    assert harness.report(0, Queried(REQUEST, (SMALL,), ())) == []
    assert harness.report(0, Synchronized(REQUEST2)) == []
    assert harness.report(0, OpFailed(1, FAILURE)) == []
    assert (harness.state.tensors, harness.state.pending) == ({}, {})


def test_the_end_of_a_session_leaves_the_others_alone():
    harness = harness_with()
    other = harness.open()
    theirs = own(1, other)
    harness.create(theirs, session=other)
    harness.define(own(100, other), ADD, session=other)
    harness.tell(RunOp(own(100, other), (theirs, theirs), (own(2, other),), (), 0, 0), session=other)
    harness.close(1)
    assert set(harness.state.tensors) == {theirs, own(2, other)}
    assert harness.state.workers[0].known_ops == {own(100, other)}


def test_session_ids_are_not_reused():
    harness = DispatcherHarness()
    first = harness.open()
    harness.close(first)
    assert harness.open() != first
