"""Copies of tensors in other layouts, and partial tensors that their reduction replaces."""

import msgspec

from gt.core.messages import DropCopies, FreeTensors, OpFailed
from tests.dispatcher_harness import (
    OP,
    OP2,
    PAIR,
    A,
    B,
    C,
    D,
    E,
    at,
    gathered_harness,
    given,
    run,
    sharded_harness,
    told,
)
from tests.records import ADD_, FAILURE, LARGE, NO_RULE, SMALL, meta, own, signature


def test_copies_are_freed_with_their_tensor():
    harness = gathered_harness()
    assert told(harness.tell(FreeTensors((A,)))) == ["0 1: free A, c2"]
    assert harness.state.copies == {}


def test_copies_are_freed_when_their_tensor_is_written():
    harness = gathered_harness()
    harness.define(OP2, ADD_)
    assert told(harness.tell(run(OP2, (A, A), (C,))))[-2:] == ["0 1: c4(A, A) -> C", "0 1: free c2"]
    assert harness.state.copies == {}


def test_copies_are_dropped_on_request_and_made_again():
    harness = gathered_harness()
    assert told(harness.tell(DropCopies((A, A, B, own(77))))) == ["0 1: free c2"]
    assert harness.state.copies == {}
    assert told(harness.tell(run(OP, (A,), (C,)))) == ["0+1: c3(A) -> c4", "0 1: op(c4) -> C"]
    assert told(harness.tell(DropCopies((A,)), DropCopies((A,)))) == ["0 1: free c4"]


def test_a_copy_whose_move_has_failed_is_made_again():
    harness = gathered_harness()
    failure = msgspec.structs.replace(FAILURE, origin=given(2))
    sent = [harness.report(worker, OpFailed(1, failure)) for worker in (0, 1)]
    assert list(map(told, sent)) == [["client: OpFailed", "0 1: free c2"], ["client: OpFailed"]]
    assert harness.state.copies == {}
    assert told(harness.tell(run(OP, (A,), (C,)))) == ["0+1: c3(A) -> c4", "0 1: op(c4) -> C"]


def test_the_failure_of_an_op_drops_no_copies():
    harness = gathered_harness()
    assert told(harness.report(0, OpFailed(1, msgspec.structs.replace(FAILURE, origin=B)))) == ["client: OpFailed"]
    assert harness.state.copies


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
    harness = gathered_harness()
    assert harness.state.bytes_on[PAIR] == 8 + 16 + 16  # A, its copy and B


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


def scalar_harness():
    """A partial number, of which no part can be reduced elsewhere."""
    return sharded_harness(text="+ x", meta=SCALAR)


def test_a_partial_tensor_that_is_also_used_unreduced_is_kept():
    """The square of a sum: one factor stays partial, the other is reduced."""
    harness = scalar_harness()
    harness.define(OP, signature("aten.mul.Tensor", 2, (SCALAR,)))
    assert told(harness.tell(run(OP, (A, A), (B,)))) == [
        "0 1: define c2: aten.mul.Tensor",
        "0 1: define c4: redistribute",
        "0+1: c4(A) -> c3",
        "0 1: c2(A, c3) -> B",
    ]
    assert [harness.layout(ident) for ident in (A, B)] == ["+ x on 0 1", "+ x on 0 1"]


def test_a_partial_tensor_may_be_added_to_itself():
    """Each worker adds its own part, and nothing is exchanged."""
    harness = scalar_harness()
    harness.define(OP, msgspec.structs.replace(ADD_, outputs=()))
    sent = told(harness.tell(run(OP, (A, A), (B,))))
    assert sent == ["0 1: define c2: aten.add_.Tensor", "0 1: c2(A, A) -> B"]
    assert (harness.layout(B), harness.state.copies) == ("+ x on 0 1", {})


def test_a_partial_tensor_may_be_multiplied_by_itself_in_place():
    """It reads a reduced copy, which is freed afterwards."""
    harness = scalar_harness()
    harness.define(OP, signature("aten.mul_.Tensor", 2, writes=(0,), functional="aten.mul.Tensor"))
    sent = told(harness.tell(run(OP, (A, A), (B,))))
    assert sent[-2:] == ["0+1: c2(A, c3) -> B", "0 1: free c3"]
    assert (harness.layout(B), harness.state.copies) == (" on 0 1", {})
