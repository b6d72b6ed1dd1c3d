"""Segments: a run of one has the effects of the instructions that it stands for, with fewer messages."""

from __future__ import annotations

import itertools
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gt.core.message_events import Event, Observer
from gt.core.messages import (
    BeginModule,
    BetweenOps,
    DefineOp,
    DefineSegment,
    DropCopies,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    NoteGradient,
    Rejected,
    RunOp,
    RunSegment,
)
from gt.core.segments import SegmentBody
from gt.dispatcher.message_queue import ToWorkers
from tests.dispatcher_harness import OP, OP2, REQUEST, A, B, C, DispatcherHarness, answers, create, harness_with
from tests.records import ADD, ADD_, SMALL, own, signature

OP3, SEGMENT = own(102), own(110)
RELU = signature("aten.relu.default", 1, (SMALL,))
OPS = {OP: ADD, OP2: ADD_, OP3: RELU}
CHAIN = DefineSegment(
    SEGMENT,
    (OP, OP3, OP, OP),
    2,
    ((0, 1), (2,), (3, 0), (4, 1)),
    ((0,), (1,), (2,), (3,)),
    (0,) * 4,
    (0,) * 4,
    (1,) * 4,
)


def harness_with_ops(workers: int = 1, observer: Observer | None = None) -> DispatcherHarness:
    """A and B, and the ops."""
    harness = harness_with(workers, observer)
    for op_id, op in OPS.items():
        harness.define(op_id, op)
    return harness


def chain(first: int, dead: tuple[int, ...] = (2, 3, 4), externals: tuple[int, ...] = (A, B)) -> RunSegment:
    return RunSegment(SEGMENT, own(first), externals, (), dead)


def commands(outgoing: list[object]) -> list[object]:
    return [out.command for out in outgoing if isinstance(out, ToWorkers)]


def test_the_first_run_is_planned_op_by_op_and_the_next_are_one_command():
    harness = harness_with_ops()
    harness.tell(CHAIN)
    first = commands(harness.tell(chain(20)))
    assert [type(command) for command in first if type(command) is not DefineOp] == [
        RunOp, RunOp, FreeTensors, RunOp, FreeTensors, RunOp, FreeTensors, DefineSegment,
    ]  # fmt: skip
    (again,) = commands(harness.tell(chain(30)))
    assert isinstance(again, RunSegment) and again.externals == (A, B) and again.dead == (2, 3, 4)
    assert harness.state.tensors.keys() == {A, B, own(23), own(33)}


def test_externals_that_die_are_freed_by_the_part():
    harness = harness_with_ops()
    harness.tell(CHAIN, chain(20), create(C))
    (command,) = commands(harness.tell(chain(30, dead=(0, 2, 3, 4), externals=(C, B))))
    assert isinstance(command, RunSegment) and command.dead == (0, 2, 3, 4)
    assert C not in harness.state.tensors


def test_other_layouts_are_planned_anew():
    harness = harness_with_ops(2)
    harness.redistribute(A, own(50), "x")
    harness.redistribute(B, own(51), "x")
    harness.tell(CHAIN)
    for externals, first in (((A, A + 50), 20), ((own(50), own(51)), 30), ((own(50), own(51)), 40)):
        if externals[1] not in harness.state.tensors:
            continue
        sent = commands(harness.tell(chain(first, externals=externals)))
    assert [type(command) for command in sent] == [RunSegment]
    assert harness.layout(own(43)) == "x on 0 1"


INVALID = {
    "unknown": RunSegment(own(111), own(20), (A, B), (), ()),
    "too few externals": RunSegment(SEGMENT, own(20), (A,), (), ()),
    "one external twice": RunSegment(SEGMENT, own(20), (A, A), (), ()),
    "scalars": RunSegment(SEGMENT, own(20), (A, B), (1.0,), ()),
    "a dead slot that is not there": RunSegment(SEGMENT, own(20), (A, B), (), (6,)),
    "a dead slot twice": RunSegment(SEGMENT, own(20), (A, B), (), (2, 2)),
    "an instruction before the ops": RunSegment(SEGMENT, own(20), (A, B), (), (), (BetweenOps(0, DropCopies((A,))),)),
    "an instruction after the ops": RunSegment(SEGMENT, own(20), (A, B), (), (), (BetweenOps(4, DropCopies((A,))),)),
    "instructions in another order": RunSegment(
        SEGMENT, own(20), (A, B), (), (), (BetweenOps(2, DropCopies((A,))), BetweenOps(1, DropCopies((A,))))
    ),
}


@pytest.mark.parametrize("run", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_run_is_refused(run):
    harness = harness_with_ops()
    harness.tell(CHAIN)
    (answer,) = answers(harness.tell(run))
    assert isinstance(answer, Rejected)
    assert harness.state.tensors.keys() == {A, B}


WRONG = {
    "an op that is not known": ((own(103),), 1, ((0,),), ((0,),)),
    "too few inputs": ((OP,), 1, ((0,),), ((0,),)),
    "a slot from the future": ((OP3,), 1, ((1,),), ((0,),)),
    "ids that do not increase": ((OP3, OP3), 1, ((0,), (0,)), ((1,), (0,))),
    "a tensor that was overwritten": ((OP2, OP3), 2, ((0, 1), (0,)), ((0,), (1,))),
    "no ops": ((), 1, (), ()),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_an_invalid_definition_is_refused(wrong):
    harness = harness_with_ops()
    op_ids, externals, inputs, outputs = wrong
    zeros = (0,) * len(op_ids)
    (answer,) = answers(harness.tell(DefineSegment(SEGMENT, op_ids, externals, inputs, outputs, zeros, zeros, zeros)))
    assert isinstance(answer, Rejected) and not harness.state.sessions[1].segments


@pytest.mark.parametrize("position", [-(1 << 62), 0, 1 << 62])
def test_a_worker_may_show_any_position_in_a_segment(position):
    harness = harness_with_ops()
    harness.tell(CHAIN)
    harness.tell(chain(20))
    (part,) = harness.state.sessions[1].segment_parts
    assert harness.dispatcher.describe_op(part, position) == "aten.add.Tensor"


def test_a_segment_is_defined_once():
    harness = harness_with_ops()
    harness.tell(CHAIN)
    (answer,) = answers(harness.tell(CHAIN))
    assert isinstance(answer, Rejected) and "is there already" in answer.reason


def test_forgotten_ops_take_their_segments_with_them():
    harness = harness_with_ops()
    harness.tell(CHAIN, chain(20))
    sent = commands(harness.tell(ForgetOps((OP3,))))
    assert any(isinstance(command, ForgetOps) and len(command.op_ids) == 1 for command in sent)
    assert not harness.state.sessions[1].segments and not harness.state.sessions[1].segment_parts


def test_a_worker_that_replays_is_described_by_its_op():
    harness = harness_with_ops()
    harness.tell(CHAIN, chain(20))
    (part,) = harness.state.sessions[1].segment_parts
    assert harness.dispatcher.describe_op(part, 1) == "aten.relu.default"


def test_after_a_loss_dependents_have_no_value():
    harness = harness_with_ops(2)
    harness.tell(CHAIN, chain(20), chain(30))
    harness.lose(0)
    harness.tell(chain(40))
    (answer,) = answers(harness.tell(FetchTensor(REQUEST, own(43))))
    assert type(answer).__name__ == "Lost"


# Laws

PROGRAMS = st.lists(
    st.tuples(st.sampled_from([OP, OP2, OP3]), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=9
)


def definition(program):
    """A valid segment with two externals, of ops whose inputs are given by numbers."""
    there, op_ids, inputs, outputs = [0, 1], [], [], []
    for number, (op_id, first, second) in enumerate(program):
        picked = [there[first % len(there)], there[second % len(there)]][: len(OPS[op_id].args)]
        if op_id == OP2:
            if picked[0] == picked[1]:
                op_id = OP
            else:
                there.remove(picked[0])
        op_ids.append(op_id)
        inputs.append(tuple(picked))
        outputs.append((number,))
        there.append(2 + number)
    zeros = (0,) * len(op_ids)
    return DefineSegment(SEGMENT, tuple(op_ids), 2, tuple(inputs), tuple(outputs), zeros, zeros, zeros), there


def instruction(kind, run, position):
    """An instruction before an op of a run, about its externals and the result of the op before. All of them may be
    gone by then."""
    if kind is NoteGradient:
        return NoteGradient(run.first + position - 1, run.externals[0], 0)
    return DropCopies(run.externals) if kind is DropCopies else BeginModule(1, run.externals, 2, (), 0)


def expand(body, run, between):
    """The instructions that a run stands for."""
    instructions, ops = [], 0
    for each in body.expand(run):
        if isinstance(each, RunOp):
            instructions += [placed.instruction for placed in between if placed.position == ops]
            ops += 1
        instructions.append(each)
    return instructions


@settings(max_examples=150, deadline=None)
@given(
    program=PROGRAMS,
    dying=st.lists(st.booleans(), min_size=12, max_size=12),
    layouts=st.sampled_from([("", ""), ("x", "x"), ("x", "-"), ("- + x", "x"), ("- + x", "- + x")]),
    losing=st.integers(0, 6),
    runs=st.integers(2, 4),
    placed=st.lists(st.tuples(st.integers(1, 8), st.sampled_from([NoteGradient, DropCopies, BeginModule])), max_size=3),
)
def test_a_run_has_the_effects_of_its_instructions(program, dying, layouts, losing, runs, placed):
    defined, there = definition(program)
    body = SegmentBody.of(defined)
    placed = sorted([each for each in placed if each[0] < len(program)], key=itemgetter(0))
    dead = tuple(slot for slot, dies in zip(there, dying, strict=False) if dies)
    states, interleaved = [], []
    for is_expanded in (False, True):
        events: list[Event] = []
        harness = harness_with_ops(2, observer=events.append)
        ids = itertools.count(1000)
        if not is_expanded:
            harness.tell(defined)
        for number in range(runs):
            externals = []
            for layout in layouts:
                ident = own(next(ids))
                harness.create(ident)
                if layout:
                    moved = own(next(ids))
                    harness.redistribute(ident, moved, layout)
                    ident = moved
                externals.append(ident)
            run = RunSegment(SEGMENT, own(2000 + 100 * number), tuple(externals), (), dead)
            between = tuple([BetweenOps(place, instruction(kind, run, place)) for place, kind in placed])
            harness.tell(*(expand(body, run, between) if is_expanded else [replace(run, between=between)]))
            if losing == number:
                harness.lose(1)
        states.append(harness.state)
        received = [event.message for event in events if event.direction == "RECV"]
        interleaved.append(
            [message for message in received if isinstance(message, NoteGradient | DropCopies | BeginModule)]
        )
    assert interleaved[0] == interleaved[1]
    with_segments, without = states
    assert with_segments.tensors == without.tensors
    assert with_segments.missing.keys() == without.missing.keys()
    assert {ident: set(copies) for ident, copies in with_segments.copies.items()} == {
        ident: set(copies) for ident, copies in without.copies.items()
    }
    assert with_segments.bytes_on == without.bytes_on


def test_a_gradient_that_a_segment_writes_to_stays_a_gradient():
    """It has another id then, under which it is reduced with others, as after a single op."""
    harness = harness_with_ops(2)
    parameter, gradient = own(60), own(61)
    harness.redistribute(A, parameter, "-")
    harness.redistribute(A, gradient, "- + x")
    harness.tell(NoteGradient(gradient, parameter, 0), RunOp(OP3, (gradient,), (own(62),), (), 0, 0))
    assert harness.layout(gradient) == "- on 0 1" and gradient in harness.state.gradients
    inputs, outputs, zeros = ((0, 1), (2,), (3, 1), (4, 3)), ((0,), (1,), (2,), (3,)), (0,) * 4
    harness.tell(DefineSegment(SEGMENT, (OP2, OP3, OP, OP), 2, inputs, outputs, zeros, zeros, zeros))
    for number, target in enumerate((own(70), own(71), gradient)):
        if target != gradient:
            harness.redistribute(A, target, "-")
        sent = commands(harness.tell(RunSegment(SEGMENT, own(300 + 10 * number), (target, parameter), (), (3, 4))))
    assert RunSegment not in map(type, sent), "a replay would not follow the gradient"
    assert harness.state.gradients.keys() == {own(320)}


def chain_of(op_ids, inputs):
    """A segment with the externals A and B, each of whose ops gives one tensor."""
    zeros = (0,) * len(op_ids)
    return DefineSegment(SEGMENT, op_ids, 2, inputs, tuple((n,) for n in range(len(op_ids))), zeros, zeros, zeros)


def test_a_note_of_a_tensor_that_a_part_overwrites_is_carried_out_before_that():
    harness = harness_with_ops()
    harness.tell(chain_of((OP, OP3, OP2, OP3), ((0, 1), (2,), (3, 1), (4,))))
    for first in (20, 30):
        note = BetweenOps(2, NoteGradient(own(first + 1), A, 0))
        sent = harness.tell(RunSegment(SEGMENT, own(first), (A, B), (), (), (note,)))
        assert not answers(sent)
    assert RunSegment not in map(type, commands(sent)), "after a replay the noted tensor would be gone"


def test_a_part_ends_where_copies_are_dropped():
    harness = harness_with_ops()
    harness.tell(chain_of((OP3,) * 6, ((0,), (2,), (3,), (4,), (5,), (6,))))
    for first in (20, 30):
        drop = BetweenOps(3, DropCopies((A,)))
        sent = commands(harness.tell(RunSegment(SEGMENT, own(first), (A, B), (), (), (drop,))))
    assert [type(command) for command in sent] == [RunSegment, RunSegment]


def test_a_part_frees_the_copy_that_it_uses_of_a_tensor_that_dies():
    """The copy after its last use, and the tensor itself, which the part does not use, before the part."""
    harness = harness_with_ops(2)
    harness.redistribute(B, own(50), "x")
    harness.tell(chain_of((OP, OP3, OP, OP3), ((0, 1), (2,), (3, 0), (4,))))
    for first in (20, 30, 40):
        harness.tell(create(own(first + 5)), RunOp(OP, (own(first + 5), own(50)), (own(first + 6),), (), 0, 0))
        assert own(first + 5) in harness.state.copies
        run = RunSegment(SEGMENT, own(first), (own(first + 5), own(50)), (), (0, 2, 3, 4))
        sent = commands(harness.tell(run))
    early, replayed = sent
    assert early == FreeTensors((own(45),))
    assert isinstance(replayed, RunSegment) and own(45) not in replayed.externals
    assert [replayed.externals[slot] for slot in replayed.dead[:-3]] == [
        ident for ident in replayed.externals if ident != own(50)
    ]
    assert own(45) not in harness.state.tensors and own(45) not in harness.state.copies
