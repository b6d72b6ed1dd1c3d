"""Tensors sharded over several workers. Messages of the dispatcher are compared as text (see `told`): `0+1: c2(A) ->
c1` is a program in which workers 0 and 1 exchange tensors, and c1, c2, ... are ids of the dispatcher's own."""

import msgspec
import pytest

from gt.core.messages import (
    Collective,
    DefineSite,
    Failed,
    Fetched,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Gathered,
    Located,
    LocateTensor,
    Queried,
    ReadTraffic,
    Redistribute,
    Rejected,
    Segment,
    Traffic,
    TrafficRead,
    WorkerReadTraffic,
)
from gt.core.signatures import SpecRecord
from gt.dispatcher.message_queue import ToClient, ToWorkers
from gt.sharding.spec import DeviceMesh
from tests.dispatcher_harness import (
    OP,
    OP2,
    PAIR,
    REQUEST,
    REQUEST2,
    A,
    B,
    C,
    D,
    E,
    answers,
    at,
    create,
    given,
    harness_with,
    over,
    query,
    run,
    sharded_harness,
    told,
)
from tests.records import ADD_, FAILURE, LARGE, NONZERO, RESIZE_, SMALL, ZEROS, meta, own, signature

RELU = signature("aten.relu.default", 1, (SMALL,))
NO_RULE = signature("aten.no_such.default", 1, (SMALL,))


# Redistribute


def test_a_tensor_is_redistributed_by_the_workers_of_both_layouts():
    harness = harness_with(3)
    assert told(harness.redistribute(B, C, "x")) == ["1 0: define c1: redistribute", "1+0: c1(B) -> C"]
    assert [harness.layout(ident) for ident in (B, C)] == ["- on 1", "x on 0 1"]
    assert harness.state.tensors[C] == (SMALL, over("x"), 8, True)


def test_a_change_of_layout_is_planned_once():
    harness = harness_with(2)
    harness.redistribute(A, C, "x")
    assert told(harness.redistribute(A, D, "x")) == ["0+1: c1(A) -> D"]


def test_a_redistribution_to_the_same_layout_is_a_local_copy():
    harness = sharded_harness()
    assert told(harness.redistribute(A, B, "x")) == ["0 1: define c2: redistribute", "0 1: c2(A) -> B"]
    assert harness.state.copies == {}


def test_slicing_a_whole_tensor_needs_no_exchange():
    harness = sharded_harness(text="-")
    assert told(harness.redistribute(A, B, "x"))[-1] == "0 1: c2(A) -> B"


def test_default_cuts_are_not_kept_in_a_layout():
    harness = harness_with(2)
    harness.redistribute(A, C, "x[0:2 2:4]")
    harness.redistribute(A, D, "x[0:3 3:4]")
    assert [harness.layout(ident) for ident in (C, D)] == ["x on 0 1", "x[0:3 3:4] on 0 1"]


PAIR_RECORD = PAIR.record()
NONSENSE = {
    "another rank": over("x, -").record(),
    "a worker that never was": over("x", DeviceMesh([2], ["x"], [0, 7])).record(),
    "an unknown axis": SpecRecord(PAIR_RECORD, (("y",),)),
    "an axis twice": SpecRecord(PAIR_RECORD, (("x",),), ("x",)),
    "an unknown reduction": SpecRecord(PAIR_RECORD, ((),), ("x",), "median"),
    "too few intervals": SpecRecord(PAIR_RECORD, (("x",),), cuts=(((0, 4),),)),
    "a mesh of nobody": SpecRecord(msgspec.structs.replace(PAIR_RECORD, workers=(0,)), ((),)),
    "an axis too many": SpecRecord(msgspec.structs.replace(PAIR_RECORD, axis_names=("x", "y")), ((),)),
    "a worker twice": SpecRecord(msgspec.structs.replace(PAIR_RECORD, workers=(0, 0)), ((),)),
}


@pytest.mark.parametrize("layout", NONSENSE.values(), ids=NONSENSE.keys())
def test_an_invalid_layout_is_rejected(layout):
    harness = harness_with(2)
    (answer,) = answers(harness.tell(Redistribute(A, C, layout, 0)))
    assert isinstance(answer, Rejected) and "Redistribute" in answer.reason
    harness.define(OP, msgspec.structs.replace(ZEROS, layout=layout))
    assert [type(answer) for answer in answers(harness.tell(run(OP, (), (C,))))] == [Rejected]
    assert harness.state.tensors.keys() == {A, B}, "what is rejected changes nothing"


def test_an_unknown_tensor_cannot_be_redistributed():
    (answer,) = answers(harness_with(2).redistribute(E, C, "x"))
    assert isinstance(answer, Rejected)


# Ops


def test_an_op_on_shards_is_one_program_for_all_workers():
    harness = sharded_harness()
    harness.define(OP, RELU)
    assert told(harness.tell(run(OP, (A,), (B,)))) == ["0 1: define c2: aten.relu.default", "0 1: c2(A) -> B"]
    assert (harness.layout(B), harness.state.tensors[B].nbytes) == ("x on 0 1", 8)


def test_a_plan_is_used_again():
    harness = sharded_harness()
    harness.define(OP, RELU)
    harness.tell(run(OP, (A,), (B,)))
    assert told(harness.tell(run(OP, (B,), (C,)))) == ["0 1: c2(B) -> C"]


def test_another_layout_is_another_plan():
    harness = sharded_harness()
    harness.redistribute(A, B, "-")
    harness.define(OP, RELU)
    assert told(harness.tell(run(OP, (A,), (C,)), run(OP, (B,), (D,)))) == [
        "0 1: define c3: aten.relu.default",
        "0 1: c3(A) -> C",
        "0 1: define op",  # whole on every worker: the op runs unchanged
        "0 1: op(B) -> D",
    ]


def test_an_op_without_a_rule_gathers_its_inputs_once():
    harness = sharded_harness()
    harness.define(OP, NO_RULE)
    first = harness.tell(DefineSite(7, "train.py", 12, "step"), run(OP, (A,), (B,), site=7))
    second = harness.tell(run(OP, (A,), (C,), site=7))
    assert told(first) == [
        "0 1: define op",
        "client: Gathered",
        "0 1: define c3: redistribute",
        "0+1: c3(A) -> c2",
        "0 1: op(c2) -> B",
    ]
    assert told(second) == ["0 1: op(c2) -> C"]
    assert harness.layout(B) == "- on 0 1"
    assert news(first) == [Gathered("aten.no_such.default", 7, False)]
    assert news(second) == [], "said once for each line"


def test_every_site_that_gathers_is_reported():
    harness = sharded_harness()
    harness.define(OP, NO_RULE)
    sites = [DefineSite(7, "train.py", 12, "step"), DefineSite(8, "train.py", 13, "step")]
    said = news(harness.tell(*sites, run(OP, (A,), (B,), site=7), run(OP, (A,), (C,), site=8)))
    assert [gathered.site for gathered in said] == [7, 8]


def test_a_query_on_a_sharded_tensor_reports_that_it_gathers():
    harness = sharded_harness()
    harness.define(OP, NONZERO)
    said = news(harness.tell(query(OP, (A,))))
    assert said == [Gathered(NONZERO.op, 0, True)]


def news(outgoing):
    return [sent.answer for sent in outgoing if isinstance(sent, ToClient) and isinstance(sent.answer, Gathered)]


def test_workers_meet_in_a_program_that_moves_tensors():
    harness = sharded_harness(text="- + x")
    harness.create(B)
    harness.define(OP, ADD_)
    assert told(harness.tell(run(OP, (A, B), (C,)))) == [
        "0 1: define c2: aten.add_.Tensor",
        "0 1: define c4: redistribute",
        "0+1: c4(B) -> c3",
        "0+1: c2(A, c3) -> C",  # which reduces A
    ]
    assert harness.layout(C) == "- on 0 1"


def test_a_write_keeps_the_layout_of_its_target():
    harness = sharded_harness()
    harness.create(B)
    harness.define(OP, ADD_)
    assert told(harness.tell(run(OP, (A, B), (C,)))) == [
        "0 1: define c2: aten.add_.Tensor",
        "0+1: c1(B) -> c3",  # as it made A
        "0 1: c2(A, c3) -> C",
    ]
    assert harness.layout(C) == "x on 0 1" and A not in harness.state.tensors
    assert harness.state.copies == {B: {over("x"): given(3)}}


def test_a_created_tensor_has_the_layout_that_the_user_gives():
    harness = harness_with(3)
    harness.define(OP, msgspec.structs.replace(ZEROS, layout=over("x").record()))
    sent = told(harness.tell(run(OP, (), (C,))))
    assert sent == ["0 1: define c1: aten.zeros.default", "0 1: c1() -> C"]
    assert harness.layout(C) == "x on 0 1"
    harness.create(D, meta=LARGE)  # another worker is the least loaded one now
    assert told(harness.tell(run(OP, (), (E,)))) == ["0 1: c1() -> E"]


def test_programs_are_forgotten_with_their_ops():
    harness = sharded_harness()
    harness.define(OP, RELU)
    harness.tell(run(OP, (A,), (B,)))
    assert told(harness.tell(ForgetOps((OP,)))) == ["0 1: forget c2", "0 1: forget c1"]  # and the move that made A
    assert harness.state.sessions[1].programs == {}


def test_the_end_of_a_session_ends_its_programs():
    harness = sharded_harness()
    harness.define(OP, NO_RULE)
    harness.tell(run(OP, (A,), (B,)))
    assert told(harness.close()) == ["0 1: WorkerEndSession"]
    assert (harness.state.tensors, harness.state.copies) == ({}, {})
    assert not any(harness.state.bytes_on.values())


# Copies


def gathered_desk():
    """A over workers 0 and 1, and c2, a whole copy of it there."""
    harness = sharded_harness()
    harness.define(OP, NO_RULE)
    harness.tell(run(OP, (A,), (B,)))
    assert harness.state.copies == {A: {over("-"): given(2)}}
    return harness


def test_copies_are_freed_with_their_tensor():
    harness = gathered_desk()
    assert told(harness.tell(FreeTensors((A,)))) == ["0 1: free A, c2"]
    assert harness.state.copies == {}


def test_copies_are_freed_when_their_tensor_is_written():
    harness = gathered_desk()
    harness.define(OP2, ADD_)
    assert told(harness.tell(run(OP2, (A, A), (C,))))[-2:] == ["0 1: c4(A, A) -> C", "0 1: free c2"]
    assert harness.state.copies == {}


def test_an_input_that_is_read_and_written_is_one_tensor():
    harness = sharded_harness()
    harness.redistribute(A, B, "x")
    harness.define(OP, signature("aten.no_such_.default", 2, writes=(0,)))
    assert told(harness.tell(run(OP, (A, A), (C,)))) == [
        "0 1: define c3: aten.no_such_.default",
        "client: Gathered",
        "0+1: c3(A) -> C",
    ]
    assert told(harness.tell(run(OP, (C, B), (D,)))) == [  # in the same layouts, but apart
        "0 1: define c4: aten.no_such_.default",
        "0 1: define c6: redistribute",
        "0+1: c6(B) -> c5",
        "0+1: c4(C, c5) -> D",
    ]
    assert told(harness.tell(run(OP, (D, D), (E,)))) == ["0+1: c3(D) -> E"]


def test_copies_count_as_load():
    harness = gathered_desk()
    assert harness.state.bytes_on[PAIR] == 8 + 16 + 16  # A, its copy and B


# Partial values


def test_a_reduced_tensor_replaces_the_partial_one():
    harness = sharded_harness(text="- + x")
    harness.define(OP, NO_RULE)
    assert told(harness.tell(run(OP, (A,), (B,)))) == [
        "0 1: define op",
        "0 1: define c2: redistribute",
        "0+1: c2(A) -> A",
        "0 1: op(A) -> B",
    ]
    assert (harness.layout(A), harness.state.copies) == ("- on 0 1", {})
    assert told(harness.tell(run(OP, (A,), (C,)))) == ["0 1: op(A) -> C"]


def test_a_partial_tensor_that_is_reduced_elsewhere_is_kept():
    harness = sharded_harness(3, text="- + x")
    harness.create(C, D, B, meta=LARGE)
    assert harness.layout(B) == "- on 1"
    harness.define(OP, signature("aten.no_such.default", 2, (SMALL,)))
    harness.tell(run(OP, (A, B), (E,)))
    assert (harness.layout(A), harness.state.copies) == ("- + x on 0 1", {A: {at(1): given(2)}})


def test_copies_outlive_the_partial_form_of_their_tensor():
    harness = sharded_harness(3, text="- + x")
    harness.create(C, D, B, meta=LARGE)
    harness.define(OP, signature("aten.no_such.default", 2, (SMALL,)))
    harness.define(OP2, NO_RULE)
    harness.tell(run(OP, (A, B), (E,)), run(OP2, (A,), (own(6),)))
    assert (harness.layout(A), harness.state.copies) == ("- on 0 1", {A: {at(1): given(2)}})


SCALAR = meta()


def scalar_desk():
    """A partial number, of which no part can be reduced elsewhere."""
    return sharded_harness(text="+ x", meta=SCALAR)


def test_a_partial_tensor_that_is_also_used_unreduced_is_kept():
    """The square of a sum: one factor stays partial, the other is reduced."""
    harness = scalar_desk()
    harness.define(OP, signature("aten.mul.Tensor", 2, (SCALAR,)))
    assert told(harness.tell(run(OP, (A, A), (B,)))) == [
        "0 1: define c2: aten.mul.Tensor",
        "0 1: define c4: redistribute",
        "0+1: c4(A) -> c3",
        "0 1: c2(A, c3) -> B",
    ]
    assert [harness.layout(ident) for ident in (A, B)] == ["+ x on 0 1", "+ x on 0 1"]


def test_a_partial_tensor_may_be_added_to_itself():
    """It reads a copy, which is freed afterwards."""
    harness = scalar_desk()
    harness.define(OP, msgspec.structs.replace(ADD_, outputs=()))
    sent = told(harness.tell(run(OP, (A, A), (B,))))
    assert sent[-2:] == ["0+1: c2(A, c3) -> B", "0 1: free c3"]
    assert (harness.layout(B), harness.state.copies) == (" on 0 1", {})


# Reading


@pytest.mark.parametrize("text", ["x", "- + x"])
def test_a_read_gathers_on_one_worker_and_keeps_no_copy(text):
    harness = sharded_harness(text=text)
    assert told(harness.tell(FetchTensor(REQUEST, A))) == [
        "0 1: define c3: redistribute",
        "0+1: c3(A) -> c2",
        "0: fetch c2",
        "0: free c2",
    ]
    assert (harness.layout(A), harness.state.copies) == (f"{text} on 0 1", {})
    fetched = Fetched(REQUEST, Segment("", 16))
    assert harness.report(0, fetched, b"0123456789abcdef") == [ToClient(1, fetched, b"0123456789abcdef")]


def test_a_whole_tensor_is_read_without_a_move():
    harness = sharded_harness(text="-")
    assert told(harness.tell(FetchTensor(REQUEST, A))) == ["0: fetch A"]


def test_a_whole_copy_is_read_and_kept():
    harness = gathered_desk()
    assert told(harness.tell(FetchTensor(REQUEST, A))) == ["0: fetch c2"]
    assert harness.state.copies == {A: {over("-"): given(2)}}


def test_a_tensor_is_located_by_its_layout():
    harness = sharded_harness()
    assert answers(harness.tell(LocateTensor(REQUEST, A))) == [Located(REQUEST, over("x").record())]


# Queries


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


# Traffic


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
    told_of = [(c.kind, c.bytes, c.op, c.site) for c in traffic(harness, False).collectives]
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
