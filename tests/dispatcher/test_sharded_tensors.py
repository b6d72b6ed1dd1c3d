"""Ops on tensors that are sharded over several workers. Messages of the dispatcher are compared as text (see `told`):
`0+1: c2(A) -> c1` is a program in which workers 0 and 1 exchange tensors, and c1, c2, ... are ids of the dispatcher's
own."""

import msgspec

from gt.core.messages import DefineSite, ForgetOps, Gathered
from gt.dispatcher.message_queue import ToClient
from tests.dispatcher_harness import OP, A, B, C, D, E, given, harness_with, over, query, run, sharded_harness, told
from tests.records import ADD_, LARGE, NO_RULE, NONZERO, SMALL, ZEROS, signature

RELU = signature("aten.relu.default", 1, (SMALL,))


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


def test_workers_exchange_tensors_in_a_program_that_moves_some():
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
    assert harness.state.sessions[1].program_names == {}


def test_the_end_of_a_session_ends_its_programs():
    harness = sharded_harness()
    harness.define(OP, NO_RULE)
    harness.tell(run(OP, (A,), (B,)))
    assert told(harness.close()) == ["0 1: WorkerEndSession"]
    assert (harness.state.tensors, harness.state.copies) == ({}, {})
    assert not any(harness.state.bytes_on.values())
