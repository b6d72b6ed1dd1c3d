"""The op that a lost worker was running, described for error messages."""

from gt.core.messages import DefineSite, ForgetOps
from gt.dispatcher.state import FACTS_KEPT
from tests.dispatcher_harness import OP, A, B, C, given, harness_with, run, sharded_harness
from tests.records import ADD, SMALL, signature


def test_the_current_op_of_a_worker_is_described_with_its_line():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(DefineSite(1, "train.py", 12, "step"), run(OP, (A, B), (C,), site=1))
    describe = harness.dispatcher.describe_op
    assert describe(OP, 1) == "aten.add.Tensor (train.py:12)"
    assert describe(given(2), 1) == "redistribute (train.py:12)"  # a move of B for it
    assert describe(OP, 99) == "aten.add.Tensor"


def test_a_program_is_named_by_its_op():
    harness = sharded_harness()
    harness.define(OP, signature("aten.relu.default", 1, (SMALL,)))
    harness.tell(run(OP, (A,), (B,)))
    assert harness.dispatcher.describe_op(given(2), 0) == "aten.relu.default"


def test_an_op_that_was_forgotten_is_still_named():
    """A worker may be at it for long after that: in an exchange with the worker that is lost."""
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(DefineSite(1, "train.py", 12, "step"), run(OP, (A, B), (C,), site=1))
    harness.lose(1)
    assert harness.dispatcher.describe_op(given(2), 1) == "redistribute (train.py:12)"
    harness.tell(ForgetOps((OP,)))
    assert harness.dispatcher.describe_op(OP, 1) == "aten.add.Tensor (train.py:12)"


def test_the_names_of_forgotten_ops_are_bounded():
    harness = harness_with()
    for op_id in range(OP, OP + FACTS_KEPT + 1):
        harness.define(op_id, ADD)
    harness.tell(ForgetOps(tuple(range(OP, OP + FACTS_KEPT + 1))))
    assert harness.dispatcher.describe_op(OP, 0) == "an op that was forgotten"
    assert harness.dispatcher.describe_op(OP + FACTS_KEPT, 0) == "aten.add.Tensor"


def test_a_worker_without_commands_has_no_current_op():
    assert harness_with().dispatcher.describe_op(0, 0) == ""


def test_the_current_op_may_be_of_a_session_that_has_ended():
    harness = harness_with()
    harness.close()
    assert harness.dispatcher.describe_op(OP, 1) == "an op of a session that has ended"
