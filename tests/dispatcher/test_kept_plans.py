"""The number of plans and of lost workers that a dispatcher remembers is limited."""

import pytest

from gt.core.messages import FetchTensor, ForgetOps, Lost, RunOp, WorkerDefineProgram
from gt.dispatcher import programs, state
from gt.dispatcher.message_queue import ToWorkers
from tests.dispatcher.test_programs import CHAIN, OP, chain, harness_with_ops
from tests.dispatcher_harness import REQUEST, A, B, answers, harness_with, run
from tests.records import own


@pytest.fixture
def few_plans(monkeypatch):
    monkeypatch.setattr(programs, "MAX_PLANS", 4)


def commands(outgoing):
    return [out.command for out in outgoing if isinstance(out, ToWorkers)]


def test_a_session_with_too_many_plans_plans_anew(few_plans):
    harness = harness_with_ops(2)
    kept, layouts = [], ["x", "-", "- + x"]
    for number in range(40):
        source = own(300 + number)
        harness.redistribute(A, source, layouts[number % 3])
        harness.tell(run(OP, (source, B if number % 2 else source), (own(400 + number),)))
        kept.append(harness.state.sessions[1].plans_kept)
    assert max(kept) <= 4 + 3 and min(kept[10:]) < 4
    assert all(own(400 + number) in harness.state.tensors for number in range(40))


def test_programs_of_forgotten_plans_are_removed_from_the_workers(few_plans):
    harness = harness_with_ops(2)
    known, defined, forgotten = set(), set(), set()
    for number in range(30):
        sent = commands(harness.redistribute(A, own(300 + number), ["x", "-"][number % 2]))
        sent += commands(harness.tell(run(OP, (own(300 + number), B), (own(400 + number),))))
        sent += commands(harness.redistribute(own(400 + number), own(500 + number), ["- + x", "x", "-"][number % 3]))
        for command in sent:
            if isinstance(command, WorkerDefineProgram):
                defined.add(command.op_id)
                known.add(command.op_id)
            elif isinstance(command, ForgetOps):
                forgotten.update(command.op_ids)
                known.difference_update(command.op_ids)
            elif isinstance(command, RunOp):
                assert command.op_id not in forgotten
    assert len(forgotten) > 10 and len(known) < 12 <= len(defined)


def test_parts_of_programs_are_made_anew_after_their_plans_were_forgotten(monkeypatch):
    harness = harness_with_ops()
    harness.tell(CHAIN)
    harness.tell(chain(20))
    assert len(commands(harness.tell(chain(30)))) == 1
    monkeypatch.setattr(programs, "MAX_PLANS", 0)
    sent = commands(harness.tell(chain(40)))
    assert isinstance(sent[0], ForgetOps) and sum(isinstance(command, RunOp) for command in sent) == 4
    assert own(43) in harness.state.tensors


def test_a_worker_that_was_lost_long_ago_is_still_known_as_lost(monkeypatch):
    monkeypatch.setattr(state, "DEAD_KEPT", 2)
    harness = harness_with(1)
    for _ in range(4):
        harness.join()
    for worker in (0, 1, 2, 3):
        harness.lose(worker, f"was killed: {worker}")
    assert list(harness.state.dead_workers) == [2, 3]
    (lost,) = answers(harness.tell(FetchTensor(REQUEST, A)))
    assert lost == Lost(REQUEST, 0, 0, "was lost long ago", "")
    assert harness.state.was_lost(1) and not harness.state.was_lost(4) and not harness.state.was_lost(9)
