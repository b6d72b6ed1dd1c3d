"""A replay leaves the tensors, failures and reports that its commands would, one by one, whichever of its ops fail."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.core.messages import DefineOp, FreeTensors, OpFailed, RunOp, RunProgram
from gt.core.meta import TensorMeta
from gt.core.program import Program
from gt.core.signatures import Input, Scalar, Signature
from gt.worker.engines import PyTorchEngine
from gt.worker.exchange import InProcessExchange
from gt.worker.executor import Executor
from gt.worker.failed_value import FailedValue
from tests.records import ADD, ADD_, SMALL, own, signature

INDICES = TensorMeta((4,), (1,), 0, "int64")
OPS = {
    own(100): ADD,
    own(101): ADD_,
    own(102): signature("aten.relu.default", 1, (SMALL,)),
    own(103): signature("aten.sort.default", 1, (SMALL, INDICES)),
    own(104): Signature("aten.mul.Scalar", (Input(0), Scalar(0)), {}, ((),), (), (SMALL,), (0,)),
}
PROGRAM, INPUTS = own(110), (own(1), own(2), own(3))
VALUES = {
    "fits": lambda: torch.arange(4.0) - 1,
    "does not fit": lambda: torch.arange(3.0),
    "is missing": lambda: None,
}


@st.composite
def programs(draw):
    """A program of three inputs, and the slots that it names and that are there at its end."""
    picked = draw(st.lists(st.sampled_from([*OPS]), min_size=2, max_size=8))
    scalars = picked.count(own(104))
    there, steps, new, scalar = [0, 1, 2], [], 3 + scalars, 3
    for op_id in picked:
        op = OPS[op_id]
        count = sum(isinstance(arg, Input) for arg in op.args)
        inputs = tuple(draw(st.lists(st.sampled_from(there), min_size=count, max_size=count, unique=bool(op.writes))))
        made = tuple(range(new, new + len(op.outputs) + len(op.writes)))
        steps.append(RunOp(op_id, inputs, made, (scalar,) if op_id == own(104) else (), 0, 9))
        scalar += op_id == own(104)
        new += len(made)
        there = [slot for slot in there if slot not in [inputs[position] for position in op.writes]]
        there += [slot for position, slot in enumerate(made) if op_id != own(103) or position == 0]
    named = {slot for step in steps for slot in (*step.inputs, *step.outputs)}
    return Program(steps, 3, scalars), [slot for slot in there if slot in named]


def executor() -> Executor:
    made = Executor(0, PyTorchEngine("cpu"), InProcessExchange(), None, owns_buffers=False)
    made.run([DefineOp(op_id, op) for op_id, op in OPS.items()], [])
    return made


def seen(value):
    """A value, or what is known of its failure."""
    if not isinstance(value, FailedValue):
        return value.tolist()
    failure, previous = value.failure, value.previous
    kept = None if previous is None else (previous.tolist(), value.since, value.until)
    return failure.origin, failure.op, failure.kind, failure.inputs, kept


@settings(max_examples=200, deadline=None)
@given(
    programs(),
    st.lists(st.booleans(), min_size=16, max_size=16),
    st.lists(st.tuples(*[st.sampled_from([*VALUES])] * 3), min_size=2, max_size=4),
)
def test_a_replay_does_what_its_commands_do(drawn, dying, runs):
    program, there = drawn
    dead = tuple(slot for slot, dies in zip(there, dying, strict=False) if dies)
    replaying, single = executor(), executor()
    replaying.run([program.definition(PROGRAM)], [])
    for number, kinds in enumerate([("fits",) * 3, *runs]):  # ops are called directly after their first success
        run = RunProgram(PROGRAM, own(1000 + 100 * number), INPUTS, (0.5,) * program.scalars, dead)
        reports = []
        for worker, commands in ((replaying, [run]), (single, program.expand(run))):
            for ident, kind in zip(INPUTS, kinds, strict=True):
                worker.tensors.pop(ident, None)
                if (value := VALUES[kind]()) is not None:
                    worker.tensors[ident] = value
            found = [report for report, _ in worker.run(commands, [])]
            reports.append([(type(each), each.session, seen(FailedValue(each.failure))) for each in found])
        assert reports[0] == reports[1]
        held = [{ident: seen(value) for ident, value in worker.tensors.items()} for worker in (replaying, single)]
        assert held[0] == held[1]


@pytest.mark.parametrize("is_direct", [False, True])
def test_ops_after_a_failed_one_run(is_direct):
    program = Program(
        [
            RunOp(own(102), (0,), (2,), (), 0, 9),
            RunOp(own(100), (2, 1), (3,), (), 0, 9),
            RunOp(own(102), (3,), (4,), (), 0, 9),
            RunOp(own(102), (0,), (5,), (), 0, 9),
        ],
        2,
        0,
    )
    worker = executor()
    worker.run([program.definition(PROGRAM)], [])
    worker.tensors.update({own(1): torch.ones(4), own(2): torch.ones(4)})
    if is_direct:
        worker.run([RunProgram(PROGRAM, own(20), INPUTS[:2], (), (2,))], [])
    worker.tensors[own(2)] = torch.ones(3)
    ((report, _),) = worker.run([RunProgram(PROGRAM, own(30), INPUTS[:2], (), (0, 2)), FreeTensors((own(2),))], [])
    assert isinstance(report, OpFailed) and report.failure.origin == own(31)
    assert worker.tensors[own(33)].tolist() == [1.0] * 4 and own(1) not in worker.tensors
    assert {worker.tensors[own(ident)].failure.origin for ident in (31, 32)} == {own(31)}
