"""The parameters of a module are gathered together when it begins, as its ops needed them last time."""

import msgspec
import pytest

from gt.core.messages import BeginModule, DefineScope, DropCopies, Goodbye, PolicyRecord, Redistribute, RunOp
from gt.core.meta import TensorMeta
from tests.dispatcher.test_worker_drains import answer, leave
from tests.dispatcher_harness import (
    OP,
    OP2,
    PAIR,
    A,
    B,
    C,
    D,
    DispatcherHarness,
    harness_with,
    over,
    run,
    sharded_harness,
    told,
)
from tests.records import ADD, NO_RULE, own, signature

FIRST, SECOND = 7, 8
OUT = own(60)


def model(workers=2, overlaps=False):
    """Parameters A and B of the first module and C of the second, cut over workers 0 and 1; an op that gathers."""
    harness = sharded_harness(workers)
    for record in harness.state.workers.values():
        record.info = msgspec.structs.replace(record.info, overlaps=overlaps)
    for ident in (B, C):
        harness.redistribute(A, ident, "x")
    harness.define(OP, NO_RULE)
    return harness


def use(harness, *tensors, first=0):
    """Run the op on tensors; each result has an id of its own."""
    return told(harness.tell(*[run(OP, (ident,), (own(first + number),)) for number, ident in enumerate(tensors, 60)]))


def begin(module, *parameters, following=0, ahead=()):
    return BeginModule(module, parameters, following, tuple(ahead), 0)


def learned(overlaps=False):
    """Both modules have run once."""
    harness = model(overlaps=overlaps)
    harness.tell(begin(FIRST, A, B))
    use(harness, A, B)
    harness.tell(begin(SECOND, C))
    use(harness, C, first=10)
    harness.tell(DropCopies((A, B, C)))
    return harness


def test_the_first_run_gathers_nothing_ahead_of_its_ops():
    assert told(model().tell(begin(FIRST, A, B))) == []


def test_the_parameters_of_a_module_that_ran_are_one_exchange():
    harness = learned()
    (exchange,) = [text for text in told(harness.tell(begin(FIRST, A, B))) if "define" not in text]
    assert exchange.startswith("0+1: ") and "(A, B) -> " in exchange
    assert harness.state.copies.keys() == {A, B}
    assert not [text for text in use(harness, A, B, first=20) if text.startswith("0+1")]


def test_only_what_the_ops_used_is_gathered():
    harness = model()
    harness.tell(begin(FIRST, A, B))
    use(harness, B)
    harness.tell(DropCopies((B,)))
    assert "(B) -> " in told(harness.tell(begin(FIRST, A, B)))[-1]
    assert harness.state.copies.keys() == {B}


def test_what_no_op_uses_any_more_is_gathered_once_for_nothing_and_then_not():
    harness = learned()
    for first, gathered in ((20, {A, B}), (30, {B}), (40, {B})):
        harness.tell(begin(FIRST, A, B))
        assert harness.state.copies.keys() == gathered
        use(harness, B, first=first)
        harness.tell(DropCopies((A, B)))
    harness.tell(begin(FIRST, A, B))
    assert len(harness.state.unused_copies) == 1
    harness.close()
    assert not harness.state.unused_copies


def test_directions_are_learned_apart():
    harness = learned()
    assert told(harness.tell(begin(SECOND + 1, C))) == []


def test_copies_that_are_there_are_not_made_again():
    harness = learned()
    harness.tell(begin(FIRST, A, B))
    assert told(harness.tell(begin(FIRST, A, B))) == []


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_next_module_is_gathered_ahead_where_exchanges_overlap(overlaps):
    harness = learned(overlaps)
    harness.tell(begin(FIRST, A, B, following=SECOND, ahead=[C]))
    assert harness.state.copies.keys() == ({A, B, C} if overlaps else {A, B})


def test_workers_of_several_machines_overlap():
    harness = DispatcherHarness()
    harness.join(host="there")
    gathers = harness.dispatcher._instructions.actions[BeginModule].__self__
    assert gathers._state.overlaps(PAIR)
    assert not learned().state.overlaps(PAIR)


def test_a_parameter_that_was_written_is_gathered_under_its_new_id():
    harness = learned()
    harness.define(OP2, signature("aten.add_.Tensor", 2, writes=(0,)))
    harness.tell(run(OP2, (A, B), (D,)))
    harness.tell(DropCopies((B,)))
    assert "(D, B) -> " in told(harness.tell(begin(FIRST, D, B)))[-1]


def test_a_parameter_in_another_layout_is_left_to_its_ops():
    harness = learned()
    harness.tell(Redistribute(C, D, over("-").record(), 0))
    assert told(harness.tell(begin(SECOND, D))) == []
    harness.create(OUT, meta=TensorMeta((4, 4), (4, 1), 0, "float32"))
    assert told(harness.tell(begin(SECOND, OUT))) == []


def test_what_would_push_out_other_copies_is_left_to_its_ops():
    harness = learned()
    harness.state.copy_limit = 16
    harness.tell(begin(FIRST, A, B))
    assert len(harness.state.copies) <= 1


@pytest.mark.parametrize("parameters", [(), (A,), (own(77), own(78)), (A, A)])
def test_other_parameters_than_last_time_are_no_mistake(parameters):
    harness = learned()
    harness.tell(begin(FIRST, *parameters))
    use(harness, A, B, first=30)


def test_after_a_loss_nothing_is_gathered_on_the_lost_worker():
    harness = model(workers=3)
    harness.redistribute(A, D, "x")
    harness.tell(begin(FIRST, A, B))
    use(harness, A, B)
    harness.lose(1)
    assert told(harness.tell(begin(FIRST, A, B))) == []


def test_after_a_loss_a_whole_parameter_is_not_sent_to_the_lost_worker():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(begin(FIRST, A, B), run(OP, (A, B), (OUT,)), DropCopies((A, B)))
    (need,) = harness.state.sessions[1].modules[FIRST].moves.values()
    harness.lose(*need.target.mesh.workers)
    assert told(harness.tell(begin(FIRST, A, B))) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_worker_needed_that_leaves_is_not_gathered_for_it_again(ahead):
    """While it leaves, a scope that names it still needs the parameters there, which have moved already."""
    harness = model(workers=3, overlaps=True)
    harness.tell(DefineScope(1, "model", PolicyRecord(PAIR.record())))
    sent = leave(harness)
    assert harness.layout(A) == "x on 0 2"
    harness.tell(begin(SECOND, A), RunOp(OP, (A,), (OUT,), (), 1, 0))
    assert answer(harness, answer(harness, sent))
    assert len(harness.state.sessions[1].modules[SECOND].moves) == 1
    harness.report(1, Goodbye())
    said = begin(FIRST, B, following=SECOND, ahead=[A]) if ahead else begin(SECOND, A)
    assert harness.tell(said) == []


def test_the_modules_of_a_session_are_bounded(monkeypatch):
    monkeypatch.setattr("gt.dispatcher.state.MODULES_KEPT", 3)
    harness = model()
    for module in range(5):
        harness.tell(begin(module, A))
        use(harness, A, first=10 * module)
        harness.tell(DropCopies((A,)))
    assert list(harness.state.sessions[1].modules) == [2, 3, 4]
