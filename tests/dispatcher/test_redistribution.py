"""Redistributed tensors. Messages of the dispatcher are compared as text (see `told`)."""

import msgspec
import pytest

from gt.core.messages import Redistribute, Rejected
from gt.core.signatures import SpecRecord
from gt.sharding.spec import DeviceMesh
from tests.dispatcher_harness import OP, PAIR, A, B, C, D, E, answers, harness_with, over, run, sharded_harness, told
from tests.records import SMALL, ZEROS


def test_a_tensor_is_redistributed_by_the_workers_of_both_layouts():
    harness = harness_with(3)
    assert told(harness.redistribute(B, C, "x")) == ["1 0: define c1: redistribute", "1+0: c1(B) -> C"]
    assert [harness.layout(ident) for ident in (B, C)] == ["- on 1", "x on 0 1"]
    assert harness.state.tensors[C] == (SMALL, over("x"), 8, True, False)


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
