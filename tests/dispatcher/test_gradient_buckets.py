"""Partial gradients of parameters, which are reduced together where the first of them is needed."""

import pytest

from gt.core.messages import (
    BeginStep,
    FetchTensor,
    FreeTensors,
    NoteGradient,
    ReadTraffic,
    Redistribute,
    Rejected,
    StoreReady,
)
from gt.dispatcher import gradient_buckets
from gt.dispatcher.gradient_buckets import layout_of_gradient
from gt.dispatcher.planner import TensorMove, plan_moves
from gt.dispatcher.tensor_records import TensorRecord
from tests.dispatcher_harness import (
    OP,
    OP2,
    REQUEST,
    A,
    B,
    DispatcherHarness,
    answers,
    over,
    query,
    run,
    told,
)
from tests.records import ADD, ADD_, NO_RULE, NONZERO, SMALL, meta, own, signature

GRADIENTS, PARAMETERS = [own(number) for number in (11, 12, 13)], [own(number) for number in (21, 22, 23)]
FIRST, SECOND, THIRD = GRADIENTS
SOURCE, RESULT = own(30), own(31)
RELU = signature("aten.relu.default", 1, (SMALL,))


def harness_with_gradients(parameters: str = "-", count: int = 3) -> DispatcherHarness:
    """Parameters in a layout over workers 0 and 1, and their partial gradients, of 16 bytes each."""
    harness = DispatcherHarness(2)
    harness.open()
    harness.create(SOURCE)
    for gradient, parameter in zip(GRADIENTS[:count], PARAMETERS, strict=False):
        harness.redistribute(SOURCE, parameter, parameters)
        harness.redistribute(SOURCE, gradient, "- + x")
        harness.tell(NoteGradient(gradient, parameter, 0))
    harness.define(OP, RELU)
    return harness


def exchanges(outgoing) -> list[str]:
    return [line.partition("(")[2] for line in told(outgoing) if line.startswith("0+1")]


def layouts(harness) -> list[str]:
    return [str(harness.state.tensors[ident].spec) for ident in GRADIENTS]


def test_gradients_wait_until_one_of_them_is_needed():
    harness = harness_with_gradients()
    assert layouts(harness) == ["- + x"] * 3
    assert exchanges(harness.tell(run(OP, (SECOND,), (RESULT,)))) == ["12, 11, 13) -> 12, 11, 13"]
    assert layouts(harness) == ["-"] * 3


@pytest.mark.parametrize("text", ["-", "x"])
def test_gradients_are_reduced_to_the_layouts_of_their_parameters(text):
    harness = harness_with_gradients(text)
    harness.tell(run(OP, (FIRST,), (RESULT,)))
    assert layouts(harness) == [text] * 3


NEEDS = {
    "an op": lambda: run(OP, (FIRST,), (RESULT,)),
    "a read": lambda: FetchTensor(REQUEST, FIRST),
    "a query": lambda: query(OP2, (FIRST,), first=own(1 << 39)),
    "a move": lambda: Redistribute(FIRST, RESULT, over("x").record(), 0),
    "a step": lambda: BeginStep(own(40), tuple(GRADIENTS), tuple(PARAMETERS), 0),
}


@pytest.mark.parametrize("need", NEEDS)
def test_one_exchange_reduces_all_gradients(need):
    harness = harness_with_gradients()
    harness.define(OP2, NONZERO)
    sent = exchanges(harness.tell(NEEDS[need]()))
    assert len([line for line in sent if "11" in line]) == 1
    assert layouts(harness) == ["-"] * 3


def test_a_step_leaves_gradients_of_other_parameters_partial():
    harness = harness_with_gradients()
    harness.tell(BeginStep(own(40), (FIRST, SECOND), tuple(PARAMETERS[:2]), 0))
    assert layouts(harness) == ["-", "-", "- + x"]


def test_a_linear_op_does_not_need_the_value():
    harness = harness_with_gradients()
    harness.define(OP2, ADD)
    assert exchanges(harness.tell(run(OP2, (FIRST, SECOND), (RESULT,)))) == []
    assert layouts(harness) == ["- + x"] * 3


def test_a_gradient_that_is_freed_is_never_reduced():
    harness = harness_with_gradients()
    harness.tell(FreeTensors((SECOND,)))
    assert exchanges(harness.tell(run(OP, (FIRST,), (RESULT,)))) == ["11, 13) -> 11, 13"]


def test_partial_values_are_added_to_a_gradient_without_an_exchange():
    harness = harness_with_gradients()
    harness.define(OP2, ADD_)
    harness.redistribute(SOURCE, A, "- + x")
    assert exchanges(harness.tell(run(OP2, (FIRST, A), (B,)))) == []
    assert exchanges(harness.tell(run(OP, (B,), (RESULT,)))) == ["B, 13, 12) -> B, 13, 12"]


def test_partial_values_are_added_to_a_reduced_gradient_without_an_exchange():
    """As after zero_grad(set_to_none=False), which keeps the reduced gradients."""
    harness = harness_with_gradients()
    harness.define(OP2, ADD_)
    harness.tell(run(OP, (FIRST,), (RESULT,)))
    harness.redistribute(SOURCE, A, "- + x")
    assert exchanges(harness.tell(run(OP2, (FIRST, A), (B,)))) == []
    assert harness.layout(B) == "- + x on 0 1"
    harness.tell(run(OP, (B,), (own(32),)))
    assert harness.layout(B) == "- on 0 1"


def test_a_full_bucket_is_closed(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 2 * SMALL.nbytes)
    harness = harness_with_gradients()
    sent = harness.tell(BeginStep(own(40), tuple(GRADIENTS), tuple(PARAMETERS), 0))
    assert exchanges(sent) == ["11, 12) -> 11, 12", "13) -> 13"]


def test_a_full_bucket_of_gradients_of_cut_parameters_is_reduced_during_backward(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "CUT_BUCKET_BYTES", 2 * SMALL.nbytes)
    assert layouts(harness_with_gradients("x")) == ["x", "x", "- + x"]
    assert layouts(harness_with_gradients("-")) == ["- + x"] * 3


def test_gradients_of_several_dtypes_are_exchanged_apart():
    harness = harness_with_gradients(count=2)
    harness.create(A, meta=meta(4, dtype="float64"))
    harness.redistribute(A, PARAMETERS[2], "-")
    harness.redistribute(A, THIRD, "- + x")
    sent = harness.tell(BeginStep(own(40), tuple(GRADIENTS), tuple(PARAMETERS), 0))
    assert exchanges(sent) == ["11, 12) -> 11, 12", "13) -> 13"]


def test_a_note_of_a_tensor_that_is_not_partial_changes_nothing():
    harness = harness_with_gradients()
    harness.tell(NoteGradient(PARAMETERS[0], PARAMETERS[1], 0))
    assert [*harness.state.gradients] == GRADIENTS


def test_a_note_of_an_unknown_tensor_is_rejected():
    harness = harness_with_gradients()
    (answer,) = answers(harness.tell(NoteGradient(own(99), PARAMETERS[0], 0)))
    assert isinstance(answer, Rejected)


def test_gradients_on_other_workers_than_their_parameters_are_moved_by_the_step():
    harness = DispatcherHarness(2)
    harness.open()
    harness.create(PARAMETERS[0], SOURCE)
    harness.redistribute(SOURCE, FIRST, "- + x")
    harness.tell(NoteGradient(FIRST, PARAMETERS[0], 0))
    assert harness.state.gradients == {}


def test_the_gradients_of_a_lost_worker_are_forgotten():
    harness = harness_with_gradients()
    harness.lose(1)
    assert harness.state.gradients == {}
    assert set(GRADIENTS) <= harness.state.missing.keys()


def test_a_step_with_a_lost_gradient_is_halted():
    harness = harness_with_gradients()
    harness.lose(1)
    harness.tell(BeginStep(own(40), tuple(GRADIENTS), tuple(PARAMETERS), 0))
    assert harness.state.sessions[1].halted is not None


def test_the_gradients_of_a_session_that_ends_are_forgotten():
    harness = harness_with_gradients()
    harness.close()
    assert harness.state.gradients == {}


def test_the_gradients_of_two_sessions_are_exchanged_apart():
    harness = harness_with_gradients(count=1)
    assert harness.open() == 2
    theirs = [own(number, 2) for number in (1, 2, 3)]
    harness.create(theirs[0], session=2)
    for target, text in zip(theirs[1:], ("-", "- + x"), strict=True):
        harness.tell(Redistribute(theirs[0], target, over(text).record(), 0), session=2)
    harness.tell(NoteGradient(theirs[2], theirs[1], 0), session=2)
    assert exchanges(harness.tell(run(OP, (FIRST,), (RESULT,)))) == ["11) -> 11"]
    assert str(harness.state.tensors[theirs[2]].spec) == "- + x"


def test_an_op_that_is_rejected_reduces_nothing():
    harness = harness_with_gradients()
    (answer,) = answers(harness.tell(run(OP, (FIRST,), (SECOND,))))
    assert isinstance(answer, Rejected)
    assert layouts(harness) == ["- + x"] * 3


def test_the_plan_of_a_bucket_is_made_once():
    harness = harness_with_gradients()
    harness.tell(run(OP, (FIRST,), (RESULT,)))
    again = [own(number) for number in (14, 15, 16)]
    for gradient, parameter in zip(again, PARAMETERS, strict=True):
        harness.redistribute(SOURCE, gradient, "- + x")
        harness.tell(NoteGradient(gradient, parameter, 0))
    sent = told(harness.tell(run(OP, (again[0],), (own(32),))))
    assert not [line for line in sent if "define" in line]


def test_the_plans_of_buckets_are_limited(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "MAX_PLANS", 1)
    harness = harness_with_gradients()
    sent = harness.tell(BeginStep(own(40), (FIRST, SECOND), tuple(PARAMETERS[:2]), 0))
    for number, dtype in enumerate(("float64", "float16"), start=50):
        source, parameter, gradients = (
            own(10 * number),
            own(10 * number + 1),
            (own(10 * number + 2), own(10 * number + 3)),
        )
        harness.create(source, meta=meta(4, dtype=dtype))
        harness.redistribute(source, parameter, "-")
        for gradient in gradients:
            harness.redistribute(source, gradient, "- + x")
        sent = harness.tell(BeginStep(own(10 * number + 4), gradients, (parameter, parameter), 0))
    assert "forget" in " ".join(told(sent))
    assert len([key for key in harness.state.sessions[1].move_plans if len(key) > 1]) == 1


def test_a_bucket_is_one_event_with_all_its_bytes():
    harness = harness_with_gradients()
    harness.tell(ReadTraffic(REQUEST, True), run(OP, (FIRST,), (RESULT,)))
    (event,) = harness.state.sessions[1].collectives
    assert (event.kind, event.nbytes, event.op, event.tensors) == ("all-reduce", 3 * 2 * SMALL.nbytes, RELU.op, 3)


@pytest.mark.parametrize(
    ("shape", "parameter", "layout", "expected"),
    [
        ((8, 4), (8, 4), "x, -", "x, -"),
        ((1, 8), (8,), "x", "-, x"),  # of a bias: a sum that keeps the dim of the batch
        ((8,), (1, 8, 1), "-, x, -", "x"),
        ((4, 8), (8, 4), "-, -", "-, -"),
        ((4, 8), (8, 4), "x, -", None),
        ((32,), (8, 4), "-, -", "-"),
        ((8, 4), (8, 4), "-, - + x", None),
    ],
)
def test_the_layout_of_a_gradient(shape, parameter, layout, expected):
    record = TensorRecord.of(meta(*parameter), over(layout))
    assert layout_of_gradient(meta(*shape), record) is (None if expected is None else over(expected))


def test_the_program_of_a_bucket_has_a_move_for_each_gradient():
    moves = [TensorMove(meta(*shape), over("-, - + x"), over("-, -")) for shape in ((4, 2), (2, 2))]
    plan = plan_moves(moves)
    assert [(step.input, step.output, step.meta.shape) for step in plan.program.steps] == [
        (0, 2, (4, 2)),
        (1, 3, (2, 2)),
    ]
    assert (plan.program.takes, plan.program.gives) == ((0, 1), (2, 3))
    assert [(found.kind, found.nbytes, found.tensors) for found in plan.collectives] == [("all-reduce", 96, 2)]


def test_a_write_that_is_not_linear_reduces_a_gradient_first():
    harness = harness_with_gradients()
    harness.define(OP2, signature("aten.relu_.default", 1, writes=(0,), functional="aten.relu.default"))
    assert exchanges(harness.tell(run(OP2, (FIRST,), (RESULT,)))) == ["11, 12, 13) -> 11, 12, 13"]
    assert harness.layout(RESULT) == "- on 0 1"


def test_an_op_without_a_rule_reduces_gradients_together():
    harness = harness_with_gradients()
    harness.define(OP2, NO_RULE)
    assert exchanges(harness.tell(run(OP2, (FIRST,), (RESULT,)))) == ["11, 12, 13) -> 11, 12, 13"]
    assert harness.state.copies == {}


# Overlap


def overlapping_harness(monkeypatch, size: int) -> DispatcherHarness:
    """Workers that compute while they exchange, buckets of `size` bytes, and parameters without gradients."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", size)
    harness = DispatcherHarness(0)
    for number in range(2):
        harness.dispatcher.join_worker("cpu", "here", number, overlaps=True)
    harness.report(0, StoreReady(40000))
    harness.open()
    harness.create(SOURCE)
    for gradient, parameter in zip(GRADIENTS, PARAMETERS, strict=True):
        harness.redistribute(SOURCE, parameter, "-")
        harness.redistribute(SOURCE, gradient, "- + x")
    return harness


def test_a_full_bucket_is_reduced_during_backward_if_the_exchange_goes_on_beside_it(monkeypatch):
    harness = overlapping_harness(monkeypatch, 32)
    sent = [exchanges(harness.tell(NoteGradient(*pair, 0))) for pair in zip(GRADIENTS, PARAMETERS, strict=True)]
    assert sent == [[], ["11, 12) -> 11, 12"], []]
    assert layouts(harness) == ["-", "-", "- + x"]


def test_gradients_that_are_added_up_are_reduced_once(monkeypatch):
    harness = overlapping_harness(monkeypatch, 16)
    harness.define(OP2, ADD_)
    harness.tell(NoteGradient(FIRST, PARAMETERS[0], 0))
    assert layouts(harness)[0] == "-"
    harness.tell(run(OP2, (FIRST, SECOND), (RESULT,)))
    assert str(harness.state.tensors[RESULT].spec) == "- + x"
    assert exchanges(harness.tell(NoteGradient(THIRD, PARAMETERS[2], 0))) == []
