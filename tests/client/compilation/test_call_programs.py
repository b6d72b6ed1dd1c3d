"""Recorded calls as programs: they stand for the recorded instructions, and free dying tensors after their last use."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gt
from gt.client import active_session
from gt.client.compilation import call_programs
from gt.client.compilation.call_programs import CallPrograms
from gt.core.message_fields import id_fields
from gt.core.messages import (
    BeginStep,
    DefineProgram,
    DropCopies,
    ForgetOps,
    FreeTensors,
    NoteGradient,
    RunOp,
    RunProgram,
)
from gt.core.program import Program
from tests.records import own

OP, EXTERNALS = own(1), (own(5), own(6))


@st.composite
def calls(draw):
    """The instructions of a call, with numbers for tensors, and the tensors that die."""
    there, instructions, ident = list(EXTERNALS), [], own(100)
    for _ in range(draw(st.integers(1, 150))):
        ident += draw(st.sampled_from([0, 0, 0, 1, 3]))  # requests of flow control take ids too
        kind = draw(st.sampled_from(["op"] * 12 + ["note", "drop", "step", "idle"]))
        used = tuple(draw(st.lists(st.sampled_from(there), min_size=1, max_size=2)))
        if kind in ("op", "idle"):
            outputs = tuple(range(ident, ident + draw(st.integers(1, 2)))) if kind == "op" else ()
            ident += len(outputs)
            scalars = (0.5,) * draw(st.integers(0, 2))
            instructions.append(RunOp(OP, used, outputs, scalars, len(instructions) % 3, 7))
            there += outputs
        elif kind == "note":
            instructions.append(NoteGradient(used[0], used[-1], 7))
        elif kind == "drop":
            instructions.append(DropCopies(used))
        else:
            instructions.append(BeginStep(ident, used, used, 7))
            ident += 1
    made = [ident for ident in there if ident not in EXTERNALS]
    return instructions, [ident for ident in made if draw(st.booleans())]


def numbered(instructions, dying, shortest):
    named = [ident for each in instructions for ident in id_fields(type(each)).all(each) if ident != OP]
    idents = list(dict.fromkeys([*EXTERNALS, *named]))
    slots = {ident: slot for slot, ident in enumerate(idents)}
    return CallPrograms(instructions, slots, dying, shortest), idents


@settings(max_examples=120, deadline=None)
@given(calls(), st.sampled_from([1, 8, None]))
def test_programs_stand_for_the_recorded_instructions(call, shortest):
    instructions, dying = call
    programs, idents = numbered(instructions, dying, shortest)
    defined = {}
    for number, each in enumerate(programs.defined):
        defined[own(900 + number)] = Program.of(each.define(own(900 + number)))
    table = (*EXTERNALS, *range(own(5000), own(5000) + len(idents) - len(EXTERNALS)))
    moved = dict(zip(idents, table, strict=True))
    scalars = [each.scalars for each in instructions if isinstance(each, RunOp)]
    expanded = []
    for emitted in programs.instructions(table, scalars):
        is_run = isinstance(emitted, RunProgram)
        expanded += defined[emitted.program_id].expand(emitted) if is_run else [emitted]
    assert (shortest is None) <= (not programs.defined)
    kept = [each for each in expanded if not isinstance(each, FreeTensors)]
    unmoved, _ = numbered(instructions, dying, None)
    assert kept == [each for each in unmoved.instructions(table, scalars) if not isinstance(each, FreeTensors)]
    freed = [ident for each in expanded if isinstance(each, FreeTensors) for ident in each.ids]
    assert sorted(freed) == sorted(moved[ident] for ident in dying)
    for position, each in enumerate(expanded):
        if isinstance(each, FreeTensors):
            others = [other for other in expanded[position + 1 :] if not isinstance(other, DropCopies)]
            later = {ident for other in others for ident in id_fields(type(other)).all(other)}
            assert later.isdisjoint(each.ids)


def steps(count=70):
    @gt.compile
    def step(x):
        for _ in range(count):
            x = x * 1.5 - 0.25
        return x

    return step


@pytest.fixture
def ended():
    yield
    gt.shutdown()


@pytest.fixture
def sent(ended, monkeypatch):
    gt.init()
    outbox = active_session.current().outbox
    batches = []
    send = outbox._channel.send
    monkeypatch.setattr(outbox._channel, "send", lambda batch, uploads: (batches.extend(batch), send(batch, uploads)))
    return batches


def test_a_skipped_call_sends_programs(sent):
    step, x = steps(), gt.ones(3)
    for _ in range(6):
        step(x)
    gt.synchronize()
    sent.clear()
    result = step(x)
    gt.synchronize()
    assert [type(each) for each in sent if isinstance(each, RunProgram | RunOp)] == [RunProgram, RunProgram]
    expected = torch.ones(3)
    for _ in range(70):
        expected = expected * 1.5 - 0.25
    assert torch.equal(result.cpu(), expected)


def test_ids_that_requests_take_in_a_recorded_call_leave_no_gap_in_its_programs(ended):
    gt.init()
    session = active_session.current()

    @gt.compile
    def step(x):
        for number in range(12):
            if number == 5:
                next(session.ids)  # as flow control does, when the client is far ahead
            x = x * 1.5
        return x

    x = gt.ones(3)
    for _ in range(6):
        assert step(x).tolist() == [1.5**12] * 3
    assert step.skipped


def test_the_tape_shows_the_ops_of_a_skipped_call(ended):
    gt.init()
    step, x = steps(), gt.ones(3)
    for _ in range(5):
        step(x)
    lines = gt.debug.tape(150)
    assert sum("aten.mul" in line and "test_call_programs.py" in line for line in lines) >= 10
    assert gt.debug.get_worker_stats().hot_paths.hits >= 2


def test_programs_of_a_function_that_is_gone_are_forgotten(sent):
    for _ in range(2):
        step, x = steps(), gt.ones(3)
        for _ in range(5):
            step(x)
        gt.synchronize()
        del step
        gc.collect()
    defined = [each.program_id for each in sent if isinstance(each, DefineProgram)]
    forgotten = [ident for each in sent if isinstance(each, ForgetOps) for ident in each.op_ids]
    assert forgotten and set(forgotten) <= set(defined)


def test_a_session_with_too_many_programs_gets_ops(sent, monkeypatch):
    monkeypatch.setattr(call_programs, "MAX_PROGRAMS", 1)
    step, x = steps(), gt.ones(3)
    results = [step(x) for _ in range(6)]
    assert all(torch.equal(result.cpu(), results[0].cpu()) for result in results)
    assert step.skipped == 1


def test_without_programs_ops_are_sent_one_by_one(ended, monkeypatch):
    monkeypatch.setenv("GT_HOTPATH", "0")
    gt.init()
    step, x = steps(), gt.ones(3)
    results = [step(x) for _ in range(6)]
    assert all(torch.equal(result.cpu(), results[0].cpu()) for result in results)
    assert step.skipped == 1 and gt.debug.get_worker_stats().hot_paths.hits == 0
