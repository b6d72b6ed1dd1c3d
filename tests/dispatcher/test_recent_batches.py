"""The lines that wrote tensors, found in the batches of the last moment."""

from gt.core.messages import DefineOp, DefineProgram, DefineSite, RunOp, RunProgram
from gt.dispatcher.recent_batches import RecentBatches
from tests.dispatcher_harness import OP, OP2, A, B, C, D, create, harness_with
from tests.records import ADD, own


def watched():
    """A dispatcher whose batches are noted, with two lines."""
    harness = harness_with()
    harness.tell(DefineSite(1, "a.py", 3, "f"), DefineSite(2, "b.py", 4, "g"), DefineOp(OP, ADD))
    harness.dispatcher.recent = RecentBatches()
    return harness, harness.dispatcher.recent


def test_a_tensor_has_the_line_that_made_it():
    harness, recent = watched()
    harness.tell(create(C, site=1), RunOp(OP, (A, B), (D,), (), 0, 2))
    assert recent.find_lines([A, C, D]) == {C: "a.py:3", D: "b.py:4"}


def test_a_line_is_known_after_its_batch_was_forgotten():
    harness, recent = watched()
    harness.tell(create(C, site=1))
    recent.find_lines([C])
    assert recent.find_lines([C]) == {C: "a.py:3"}
    assert recent.find_lines([]) == {}
    assert recent.find_lines([C]) == {}  # nobody wanted to know of it


def test_a_tensor_may_be_seen_before_its_batch_is_noted():
    harness, recent = watched()
    assert recent.find_lines([C]) == {}
    harness.tell(create(C, site=1))
    assert recent.find_lines([C]) == {C: "a.py:3"}


def test_a_tensor_that_was_missed_twice_is_not_looked_for_again():
    harness, recent = watched()
    for _ in range(2):
        recent.find_lines([A, C])
    harness.tell(create(C, site=1))
    assert recent.find_lines([A, C]) == {}


def test_the_tensors_of_a_segment_have_the_lines_of_its_ops():
    harness, recent = watched()
    harness.tell(
        DefineProgram(OP2, 2, 0, (RunOp(OP, (0, 1), (2,), (), 0, 1), RunOp(OP, (2, 1), (3,), (), 0, 2))),
        RunProgram(OP2, own(50), (A, B), (), ()),
    )
    assert recent.find_lines([own(50), own(51)]) == {own(50): "a.py:3", own(51): "b.py:4"}


def test_batches_over_the_limit_are_dropped_and_counted():
    harness, _ = watched()
    recent = harness.dispatcher.recent = RecentBatches(limit=1)
    harness.tell(create(C, site=1), create(D, site=2))
    assert (recent.dropped, recent.find_lines([C, D])) == (1, {C: "a.py:3"})
