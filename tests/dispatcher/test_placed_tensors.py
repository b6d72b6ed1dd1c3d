"""PlaceTensor: a tensor gets another layout and keeps its id."""

from gt.core.messages import PlaceTensor, Rejected
from tests.dispatcher_harness import PAIR, A, B, DispatcherHarness, answers, at, over, told


def placed(harness, ident, text):
    return harness.tell(PlaceTensor(ident, over(text, PAIR).record(), 0))


def with_tensor(text):
    harness = DispatcherHarness(workers=2)
    harness.open()
    harness.create(B)
    harness.redistribute(B, A, text)
    return harness


def test_a_placed_tensor_keeps_its_id_and_has_one_layout():
    harness = with_tensor("x")
    sent = told(placed(harness, A, "-"))
    assert harness.layout(A) == "- on 0 1"
    assert sum("A" in line for line in sent) == 1
    assert not harness.state.copies.get(A)


def test_a_tensor_that_lies_so_is_left_alone():
    assert placed(with_tensor("x"), A, "x") == []


def test_a_partial_tensor_is_reduced():
    harness = with_tensor("- + x")
    placed(harness, A, "x")
    assert harness.layout(A) == "x on 0 1"


def test_a_tensor_of_one_worker_moves_to_the_mesh():
    harness = DispatcherHarness(workers=2)
    harness.open()
    harness.create(A)
    assert harness.state.tensors[A].spec is at(0)
    placed(harness, A, "x")
    assert harness.layout(A) == "x on 0 1"


def test_a_tensor_that_was_freed_is_ignored_and_a_wrong_layout_refused():
    harness = with_tensor("x")
    assert placed(harness, A + 1000, "-") == []
    (answer,) = answers(placed(harness, A, "x, -"))
    assert isinstance(answer, Rejected)
