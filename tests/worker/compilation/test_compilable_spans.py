"""Spans of ops in a program that can be compiled together, and the units that are made of them."""

from collections.abc import Mapping, Sequence

import pytest

from gt.core.messages import RunOp
from gt.core.meta import TensorMeta
from gt.core.program import Program
from gt.core.signatures import Input, Scalar, Signature
from gt.worker.bound_ops import BoundOp
from gt.worker.bound_programs import BoundProgram
from gt.worker.compilation.compilable_spans import MIN_CALLS, UncompiledOp, find_spans, make_unit
from gt.worker.engines.pytorch_engine import PyTorchEngine

ENGINE = PyTorchEngine("cpu")
META = TensorMeta((4,), (1,), 0, "float32")
OPS = {
    "neg": Signature("aten.neg.default", (Input(0),), {}, (), (), (META,), (0,)),
    "mul": Signature("aten.mul.Scalar", (Input(0), Scalar(0)), {}, (), (), (META,), (0,)),
    "leaky": Signature("aten.leaky_relu.default", (Input(0), Scalar(0)), {}, (), (), (META,), (0,)),
    "add_": Signature("aten.add_.Tensor", (Input(0), Input(1)), {}, (), (0,), (), ()),
    "nonzero": Signature("aten.nonzero.default", (Input(0),), {}, (), (), (META,), (0,)),
}


def make_program(names: str, scopes: Sequence[int] = ()) -> BoundProgram:
    """A chain of ops on one tensor: each takes the result of the one before, and `add_` the first tensor too."""
    chain = names.split()
    scaled = [name in ("mul", "leaky") for name in chain]
    ops, last = [], 0
    for number, name in enumerate(chain):
        inputs = (last, 0) if name == "add_" else (last,)
        scalars = (1 + sum(scaled[:number]),) if scaled[number] else ()
        last = 1 + sum(scaled) + number
        ops.append(RunOp(list(OPS).index(name), inputs, (last,), scalars, scopes[number] if scopes else 0, 0))
    bound = {number: BoundOp(ENGINE, signature) for number, signature in enumerate(OPS.values())}
    return BoundProgram(Program(ops, 1, sum(scaled)), bound)


def metas(program: BoundProgram) -> dict[int, TensorMeta]:
    return dict.fromkeys(range(program.program.slots), META)


def runs_in(
    program: BoundProgram, refused: Mapping[int, str] | None = None, scopes: Sequence[int] = (0, 1)
) -> list[range]:
    return find_spans(program, lambda op: op.scope in scopes, metas(program), refused or {})[0]


def test_ops_that_follow_each_other_are_one_span() -> None:
    assert runs_in(make_program("neg mul add_ neg")) == [range(4)]


def test_few_ops_are_not_worth_it() -> None:
    assert runs_in(make_program(" ".join(["neg"] * (MIN_CALLS - 1)))) == []


def test_an_op_that_stays_eager_cuts_a_span_and_is_named() -> None:
    program = make_program("neg neg neg nonzero neg neg neg")
    spans, eager = find_spans(program, lambda op: True, metas(program), {})
    assert spans == [range(3), range(4, 7)]
    reason = "its result depends on values (dynamic_output_shape)"
    assert eager == [UncompiledOp(3, "aten.nonzero.default", reason)]


def test_a_refused_op_cuts_a_span() -> None:
    assert runs_in(make_program("neg neg neg neg neg neg neg"), {3: "it cannot be traced"}) == [range(3), range(4, 7)]


def test_a_span_ends_with_its_scope() -> None:
    program = make_program("neg neg neg neg neg neg", [0, 0, 0, 1, 1, 1])
    assert runs_in(program) == [range(3), range(3, 6)]
    assert runs_in(program, scopes=[1]) == [range(3, 6)]


def test_an_input_without_a_value_is_not_compiled() -> None:
    program = make_program("neg neg neg")
    assert find_spans(program, lambda op: True, {}, {})[0] == []


def test_a_unit_has_the_inputs_calls_and_live_tensors_of_its_ops() -> None:
    program = make_program("neg neg mul add_ leaky neg")
    placed = make_unit(program, range(1, 5), metas(program), frozenset([5, 7]), [2.0, 0.1], 1)
    assert placed.inputs == (3, 0)
    assert [call.signature.op.split(".")[1] for call in placed.unit.calls] == ["neg", "mul", "add_", "leaky_relu"]
    assert [(call.inputs, call.outputs) for call in placed.unit.calls] == [
        ((0,), (2,)),
        ((2,), (3,)),
        ((3, 1), ()),
        ((3,), (4,)),
    ]
    assert placed.unit.live == (3, 4)
    assert placed.outputs == (None, 0, None, 1)
    assert placed.op_of_call == (1, 2, 3, 4)


def test_a_number_is_a_constant_where_the_op_has_no_dynamic_form() -> None:
    program = make_program("mul leaky mul")
    placed = make_unit(program, range(3), metas(program), frozenset([3]), [2.0, 0.1, 3], 1)
    assert placed.unit.scalars == (None, 0.1, 3)
    assert placed.scalars == (1, 2, 3)


@pytest.mark.parametrize("first", [0, 4])
def test_equal_spans_are_equal_units(first: int) -> None:
    program = make_program("neg mul neg nonzero neg mul neg")
    run = range(first, first + 3)
    unit = make_unit(program, run, metas(program), frozenset([first + 3]), [1.0, 2.0], 1).unit
    other = make_unit(program, range(3), metas(program), frozenset([3]), [1.0, 2.0], 1).unit
    assert unit.key == other.key
