"""The limit on the bytes of copies: the least recently used copies are dropped for a new one."""

import pytest

from gt.core.messages import BeginStep, WorkerInfo
from gt.dispatcher.redistribution import default_limit
from gt.dispatcher.state_records import WorkerRecord
from tests.dispatcher_harness import (
    OP,
    OP2,
    REQUEST,
    A,
    B,
    C,
    D,
    E,
    query,
    run,
    sharded_harness,
    solo_mesh,
    told,
)
from tests.records import NO_RULE, SMALL, own, signature

COPY = 16  # bytes of a whole copy of A, B or C


def limited_harness(limit):
    """A, B and C over workers 0 and 1, and an op without a rule, which gathers them."""
    harness = sharded_harness()
    harness.redistribute(A, B, "x")
    harness.redistribute(A, C, "x")
    harness.dispatcher.state.copy_limit = limit
    harness.define(OP, NO_RULE)
    return harness


def use(harness, *tensors):
    """Run the op on tensors, and return those that have a copy then."""
    for number, ident in enumerate(tensors):
        harness.tell(run(OP, (ident,), (own(50 + number + 10 * len(harness.state.tensors)),)))
    return list(harness.state.copies)


@pytest.mark.parametrize(
    ("limit", "used", "kept"),
    [
        (3 * COPY, [A, B, C], [A, B, C]),
        (2 * COPY, [A, B, C], [B, C]),
        (2 * COPY, [A, B, A, C], [A, C]),  # A was used after B
        (3 * COPY - 1, [A, B, C], [B, C]),
        (COPY, [A, B, C], [C]),
        (0, [A, B, C], [C]),  # an op has the copies that it needs, whatever the limit
        (None, [A, B, C], [A, B, C]),
    ],
)
def test_the_least_recently_used_copies_are_dropped(limit, used, kept):
    assert use(limited_harness(limit), *used) == kept


def test_a_copy_is_freed_before_the_new_one_is_made():
    harness = limited_harness(COPY)
    use(harness, A)
    assert told(harness.tell(run(OP, (B,), (D,)))) == ["0 1: free c3", "0+1: c4(B) -> c5", "0 1: op(c5) -> D"]


def test_copies_of_one_op_do_not_drop_each_other():
    harness = limited_harness(0)
    harness.define(OP2, signature("aten.no_such_two.default", 3, (SMALL,)))
    sent = told(harness.tell(run(OP2, (A, B, C), (D,))))
    assert not [line for line in sent if "free" in line]
    assert sent[-1] == "0 1: op2(c3, c5, c6) -> D"
    assert list(harness.state.copies) == [A, B, C]


def test_copies_of_one_query_do_not_drop_each_other():
    harness = limited_harness(0)
    harness.define(OP2, signature("aten.no_such_query.default", 2))
    sent = told(harness.tell(query(OP2, (A, B), first=own(1 << 39), request=REQUEST)))
    assert not [line for line in sent if "free" in line]


def test_gradients_of_one_step_do_not_drop_each_other():
    """A worker learns from them that a gradient of another worker has no value."""
    harness = limited_harness(0)
    for source, gradient in ((A, D), (B, E)):  # on another mesh, or they would be replaced
        harness.redistribute(source, gradient, "-", solo_mesh(0))
    harness.tell(BeginStep(own(90), (D, E), (A, B), 0))
    assert list(harness.state.copies) == [D, E]


def test_workers_are_limited_one_by_one():
    """A copy on other workers does not have to go."""
    harness = sharded_harness(4)
    harness.redistribute(A, B, "x")
    harness.redistribute(A, C, "-", solo_mesh(2))
    harness.state.copy_limit = COPY
    harness.define(OP, NO_RULE)
    harness.define(OP2, signature("aten.no_such_two.default", 2, (SMALL,)))
    use(harness, A)
    harness.redistribute(A, E, "-", solo_mesh(3))
    before = dict(harness.state.copies)
    harness.tell(run(OP2, (C, E), (D,)))
    assert before.items() <= harness.state.copies.items() and len(harness.state.copies) == 2


def worker(memory, device="cpu", host="here"):
    return WorkerRecord(WorkerInfo(0, device, host, 1), solo_mesh(0), memory=memory)


@pytest.mark.parametrize(
    ("workers", "limit"),
    [
        ([worker(800)], 400),
        ([worker(800), worker(800)], 200),  # two workers share the memory of a machine
        ([worker(800, "cuda:0"), worker(600, "cuda:1")], 300),
        ([worker(800), worker(100, host="there")], 50),
        ([worker(0)], None),
        ([], None),
    ],
)
def test_without_a_setting_the_limit_is_half_of_the_memory_of_a_worker(workers, limit):
    assert default_limit(workers) == limit


def test_the_limit_changes_with_the_workers():
    harness = sharded_harness()
    assert harness.state.copy_limit is None
    harness.dispatcher.join_worker("cpu", "here", 1, 4096)
    assert harness.state.copy_limit == 2048
    harness.lose(2)
    assert harness.state.copy_limit is None
