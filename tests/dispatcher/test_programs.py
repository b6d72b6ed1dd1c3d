"""Programs: a run of one has the effects of the instructions that it stands for, with fewer messages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.core.message_events import Event, Observer
from gt.core.messages import (
    BeginModule,
    DefineOp,
    DefineProgram,
    DropCopies,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    NoteGradient,
    Rejected,
    RunOp,
    RunProgram,
)
from gt.core.program import Program, capture
from gt.dispatcher.message_queue import ToWorkers
from tests.dispatcher_harness import OP, OP2, REQUEST, A, B, C, DispatcherHarness, answers, create, harness_with
from tests.records import ADD, ADD_, SMALL, define_program, own, signature

OP3, PROGRAM = own(102), own(110)
RELU = signature("aten.relu.default", 1, (SMALL,))
OPS = {OP: ADD, OP2: ADD_, OP3: RELU}
CHAIN = define_program(PROGRAM, (OP, (0, 1)), (OP3, (2,)), (OP, (3, 0)), (OP, (4, 1)))


def harness_with_ops(workers: int = 1, observer: Observer | None = None) -> DispatcherHarness:
    """A and B, and the ops."""
    harness = harness_with(workers, observer)
    for op_id, op in OPS.items():
        harness.define(op_id, op)
    return harness


def chain(first: int, dead: tuple[int, ...] = (2, 3, 4), inputs: tuple[int, ...] = (A, B)) -> RunProgram:
    return RunProgram(PROGRAM, own(first), inputs, (), dead)


def commands(outgoing: list[object]) -> list[object]:
    return [out.command for out in outgoing if isinstance(out, ToWorkers)]


def test_the_first_run_is_planned_op_by_op_and_the_next_are_one_command():
    harness = harness_with_ops()
    harness.tell(CHAIN)
    first = commands(harness.tell(chain(20)))
    assert [type(command) for command in first if type(command) is not DefineOp] == [
        RunOp, RunOp, FreeTensors, RunOp, FreeTensors, RunOp, FreeTensors, DefineProgram,
    ]  # fmt: skip
    (again,) = commands(harness.tell(chain(30)))
    assert isinstance(again, RunProgram) and again.inputs == (A, B) and again.dead == (2, 3, 4)
    assert harness.state.tensors.keys() == {A, B, own(23), own(33)}


def test_inputs_that_die_are_freed_by_the_part():
    harness = harness_with_ops()
    harness.tell(CHAIN, chain(20), create(C))
    (command,) = commands(harness.tell(chain(30, dead=(0, 2, 3, 4), inputs=(C, B))))
    assert isinstance(command, RunProgram) and command.dead == (0, 2, 3, 4)
    assert C not in harness.state.tensors


def test_other_layouts_are_planned_anew():
    harness = harness_with_ops(2)
    harness.redistribute(A, own(50), "x")
    harness.redistribute(B, own(51), "x")
    harness.tell(CHAIN)
    for inputs, first in (((A, A + 50), 20), ((own(50), own(51)), 30), ((own(50), own(51)), 40)):
        if inputs[1] not in harness.state.tensors:
            continue
        sent = commands(harness.tell(chain(first, inputs=inputs)))
    assert [type(command) for command in sent] == [RunProgram]
    assert harness.layout(own(43)) == "x on 0 1"


INVALID = {
    "unknown": RunProgram(own(111), own(20), (A, B), (), ()),
    "too few inputs": RunProgram(PROGRAM, own(20), (A,), (), ()),
    "one input twice": RunProgram(PROGRAM, own(20), (A, A), (), ()),
    "scalars": RunProgram(PROGRAM, own(20), (A, B), (1.0,), ()),
    "a dead slot that is not there": RunProgram(PROGRAM, own(20), (A, B), (), (6,)),
    "a dead slot twice": RunProgram(PROGRAM, own(20), (A, B), (), (2, 2)),
}


@pytest.mark.parametrize("run", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_run_is_refused(run):
    harness = harness_with_ops()
    harness.tell(CHAIN)
    (answer,) = answers(harness.tell(run))
    assert isinstance(answer, Rejected)
    assert harness.state.tensors.keys() == {A, B}


WRONG = {
    "an op that is not known": define_program(PROGRAM, (own(103), (0,))),
    "an op of another session": define_program(PROGRAM, (own(100, 2), (0,))),
    "too few inputs": define_program(PROGRAM, (OP, (0,))),
    "a slot from the future": define_program(PROGRAM, (OP3, (2,))),
    "a slot that a later op gives": define_program(PROGRAM, (OP3, (3,)), (OP3, (0,))),
    "slots that do not increase": define_program(
        PROGRAM, RunOp(OP3, (0,), (3,), (), 0, 0), RunOp(OP3, (0,), (2,), (), 0, 0)
    ),
    "a slot that is given twice": define_program(
        PROGRAM, RunOp(OP3, (0,), (2,), (), 0, 0), RunOp(OP3, (0,), (2,), (), 0, 0)
    ),
    "a tensor that was overwritten": define_program(PROGRAM, (OP2, (0, 1)), (OP3, (0,))),
    "a note of a tensor from the future": define_program(PROGRAM, NoteGradient(2, 0, 0), (OP3, (0,))),
    "a note of a tensor that was overwritten": define_program(PROGRAM, (OP2, (0, 1)), NoteGradient(0, 1, 0)),
    "copies of a tensor that is not there": define_program(PROGRAM, (OP3, (0,)), DropCopies((9,))),
    "a scalar for a tensor": DefineProgram(PROGRAM, 1, 1, (RunOp(OP3, (1,), (2,), (1,), 0, 0),)),
    "a tensor for a scalar": DefineProgram(PROGRAM, 1, 1, (RunOp(OP3, (0,), (2,), (0,), 0, 0),)),
    "scalars that no op has": DefineProgram(PROGRAM, 1, 1, (RunOp(OP3, (0,), (2,), (), 0, 0),)),
    "a number for a scalar's slot": DefineProgram(PROGRAM, 1, 1, (RunOp(OP3, (0,), (2,), (1.5,), 0, 0),)),
    "no ops": define_program(PROGRAM, DropCopies((0,))),
    "nothing": define_program(PROGRAM),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_an_invalid_definition_is_refused(wrong):
    harness = harness_with_ops()
    (answer,) = answers(harness.tell(wrong))
    assert isinstance(answer, Rejected) and not harness.state.sessions[1].programs


@pytest.mark.parametrize("position", [-(1 << 62), 0, 1 << 62])
def test_a_worker_may_show_any_position_in_a_program(position):
    harness = harness_with_ops()
    harness.tell(CHAIN)
    harness.tell(chain(20))
    (part,) = harness.state.sessions[1].program_parts
    assert harness.dispatcher.describe_op(part, position) == "aten.add.Tensor"


def test_a_program_is_defined_once():
    harness = harness_with_ops()
    harness.tell(CHAIN)
    (answer,) = answers(harness.tell(CHAIN))
    assert isinstance(answer, Rejected) and "is there already" in answer.reason


def test_forgotten_ops_take_their_programs_with_them():
    harness = harness_with_ops()
    harness.tell(CHAIN, chain(20))
    sent = commands(harness.tell(ForgetOps((OP3,))))
    assert any(isinstance(command, ForgetOps) and len(command.op_ids) == 1 for command in sent)
    assert not harness.state.sessions[1].programs and not harness.state.sessions[1].program_parts


def test_a_worker_that_replays_is_described_by_its_op():
    harness = harness_with_ops()
    harness.tell(CHAIN, chain(20))
    (part,) = harness.state.sessions[1].program_parts
    assert harness.dispatcher.describe_op(part, 1) == "aten.relu.default"


def test_after_a_loss_dependents_have_no_value():
    harness = harness_with_ops(2)
    harness.tell(CHAIN, chain(20), chain(30))
    harness.lose(0)
    harness.tell(chain(40))
    (answer,) = answers(harness.tell(FetchTensor(REQUEST, own(43))))
    assert type(answer).__name__ == "Lost"


# Laws

OPS_AND_INPUTS = st.lists(
    st.tuples(st.sampled_from([OP, OP2, OP3]), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=9
)
OTHERS = st.lists(st.tuples(st.integers(1, 8), st.sampled_from([NoteGradient, DropCopies, BeginModule])), max_size=3)


def definition(ops, others):
    """A valid program with two inputs, of ops whose inputs are given by numbers, and of other steps, each before the op
    at a position. Returns the slots that are there at its end."""
    there, steps = [0, 1], []
    for number, (op_id, first, second) in enumerate(ops):
        steps += [step(kind, there, number) for place, kind in others if place == number]
        picked = [there[first % len(there)], there[second % len(there)]][: len(OPS[op_id].args)]
        if op_id == OP2:
            if picked[0] == picked[1]:
                op_id = OP
            else:
                there.remove(picked[0])
        steps.append(RunOp(op_id, tuple(picked), (2 + number,), (), 0, 0))
        there.append(2 + number)
    return define_program(PROGRAM, *steps), there


def step(kind, there, number):
    """A step that names the result of the op before it, and a tensor from before."""
    if kind is NoteGradient:
        return NoteGradient(1 + number, there[0], 0)
    return DropCopies((there[0],)) if kind is DropCopies else BeginModule(1, (there[0],), 2, (), 0)


@settings(max_examples=150, deadline=None)
@given(
    ops=OPS_AND_INPUTS,
    dying=st.lists(st.booleans(), min_size=12, max_size=12),
    layouts=st.sampled_from([("", ""), ("x", "x"), ("x", "-"), ("- + x", "x"), ("- + x", "- + x")]),
    losing=st.integers(0, 6),
    runs=st.integers(2, 4),
    others=OTHERS,
)
def test_a_run_has_the_effects_of_its_instructions(ops, dying, layouts, losing, runs, others):
    defined, there = definition(ops, others)
    program = Program.of(defined)
    dead = tuple(slot for slot, dies in zip(there, dying, strict=False) if dies)
    states, interleaved = [], []
    for is_expanded in (False, True):
        events: list[Event] = []
        harness = harness_with_ops(2, observer=events.append)
        ids = itertools.count(1000)
        if not is_expanded:
            harness.tell(defined)
        for number in range(runs):
            inputs = []
            for layout in layouts:
                ident = own(next(ids))
                harness.create(ident)
                if layout:
                    moved = own(next(ids))
                    harness.redistribute(ident, moved, layout)
                    ident = moved
                inputs.append(ident)
            run = RunProgram(PROGRAM, own(2000 + 100 * number), tuple(inputs), (), dead)
            harness.tell(*(program.expand(run) if is_expanded else [run]))
            if losing == number:
                harness.lose(1)
        states.append(harness.state)
        received = [event.message for event in events if event.direction == "RECV"]
        interleaved.append(
            [message for message in received if isinstance(message, NoteGradient | DropCopies | BeginModule)]
        )
    assert interleaved[0] == interleaved[1]
    with_programs, without = states
    assert with_programs.tensors == without.tensors
    assert with_programs.missing.keys() == without.missing.keys()
    assert {ident: set(copies) for ident, copies in with_programs.copies.items()} == {
        ident: set(copies) for ident, copies in without.copies.items()
    }
    assert with_programs.bytes_on == without.bytes_on


def test_a_gradient_that_a_program_writes_to_stays_a_gradient():
    """It has another id then, under which it is reduced with others, as after a single op."""
    harness = harness_with_ops(2)
    parameter, gradient = own(60), own(61)
    harness.redistribute(A, parameter, "-")
    harness.redistribute(A, gradient, "- + x")
    harness.tell(NoteGradient(gradient, parameter, 0), RunOp(OP3, (gradient,), (own(62),), (), 0, 0))
    assert harness.layout(gradient) == "- on 0 1" and gradient in harness.state.gradients
    harness.tell(define_program(PROGRAM, (OP2, (0, 1)), (OP3, (2,)), (OP, (3, 1)), (OP, (4, 3))))
    for number, target in enumerate((own(70), own(71), gradient)):
        if target != gradient:
            harness.redistribute(A, target, "-")
        sent = commands(harness.tell(RunProgram(PROGRAM, own(300 + 10 * number), (target, parameter), (), (3, 4))))
    assert RunProgram not in map(type, sent), "a replay would not follow the gradient"
    assert harness.state.gradients.keys() == {own(320)}


def test_a_note_of_a_tensor_that_a_part_overwrites_is_carried_out_before_that():
    harness = harness_with_ops()
    harness.tell(define_program(PROGRAM, (OP, (0, 1)), (OP3, (2,)), NoteGradient(3, 0, 0), (OP2, (3, 1)), (OP3, (4,))))
    for first in (20, 30):
        sent = harness.tell(RunProgram(PROGRAM, own(first), (A, B), (), ()))
        assert not answers(sent)
    assert RunProgram not in map(type, commands(sent)), "after a replay the noted tensor would be gone"


def test_a_part_ends_where_copies_are_dropped():
    harness = harness_with_ops()
    ops = [(OP3, (slot,)) for slot in (0, 2, 3, 4, 5, 6)]
    harness.tell(define_program(PROGRAM, *ops[:3], DropCopies((0,)), *ops[3:]))
    for first in (20, 30):
        sent = commands(harness.tell(RunProgram(PROGRAM, own(first), (A, B), (), ())))
    assert [type(command) for command in sent] == [RunProgram, RunProgram]


def test_a_part_frees_the_copy_that_it_uses_of_a_tensor_that_dies():
    """The copy after its last use, and the tensor itself, which the part does not use, before the part."""
    harness = harness_with_ops(2)
    harness.redistribute(B, own(50), "x")
    harness.tell(define_program(PROGRAM, (OP, (0, 1)), (OP3, (2,)), (OP, (3, 0)), (OP3, (4,))))
    for first in (20, 30, 40):
        harness.tell(create(own(first + 5)), RunOp(OP, (own(first + 5), own(50)), (own(first + 6),), (), 0, 0))
        assert own(first + 5) in harness.state.copies
        run = RunProgram(PROGRAM, own(first), (own(first + 5), own(50)), (), (0, 2, 3, 4))
        sent = commands(harness.tell(run))
    early, replayed = sent
    assert early == FreeTensors((own(45),))
    assert isinstance(replayed, RunProgram) and own(45) not in replayed.inputs
    assert [replayed.inputs[slot] for slot in replayed.dead[:-3]] == [
        ident for ident in replayed.inputs if ident != own(50)
    ]
    assert own(45) not in harness.state.tensors and own(45) not in harness.state.copies


def test_a_note_is_carried_out_before_an_op_that_uses_its_tensor_last():
    harness = harness_with_ops()
    harness.tell(define_program(PROGRAM, (OP, (0, 1)), (OP3, (2,)), NoteGradient(3, 0, 0), (OP, (3, 1)), (OP3, (4,))))
    for first in (20, 30):
        sent = harness.tell(RunProgram(PROGRAM, own(first), (A, B), (), (3,)))
        assert not answers(sent)
    assert own(31) not in harness.state.tensors


def test_a_note_of_a_dying_tensor_is_carried_out_before_it_is_freed():
    harness = harness_with_ops()
    harness.tell(define_program(PROGRAM, (OP, (0, 1)), (OP3, (2,)), (OP, (3, 1)), NoteGradient(3, 0, 0), (OP3, (4,))))
    for first in (20, 30):
        sent = commands(harness.tell(RunProgram(PROGRAM, own(first), (A, B), (), (3,))))
    assert [type(command) for command in sent] == [RunProgram, FreeTensors]
    assert own(31) not in harness.state.tensors and not harness.state.gradients


@given(ops=OPS_AND_INPUTS, others=OTHERS, first=st.integers(2000, 3000))
def test_the_instructions_of_a_run_are_captured_as_its_program(ops, others, first):
    program = Program.of(definition(ops, others)[0])
    used = {slot for step in program.steps for slot in getattr(step, "inputs", ())}
    run = RunProgram(PROGRAM, own(first), (A, B), (), ())
    found = capture(program.expand(run))
    if used >= {0, 1} and found.inputs == (A, B):
        assert found.program.steps == program.steps
    assert found.made == tuple(range(own(first), own(first) + program.made))
    again = RunProgram(PROGRAM, own(first), found.inputs, (), ())
    assert found.program.expand(again) == program.expand(run)
