"""Plans of ops that read views or write to tensors, as text (see plan_text.py)."""

import msgspec
import pytest

from gt.core.signatures import Input
from gt.sharding.spec import whole
from gt.sharding.spec_text import parse_spec
from tests.dispatcher.plan_text import (
    ADD_,
    ADD_OUT,
    MESH,
    NO_RULE_,
    RELU,
    SQUARE,
    TRANSPOSED,
    kinds,
    plan,
    show,
    steps,
    through,
    view,
)
from tests.records import meta

ROW = view("select.int", 0, 1, shape=(4,))
COLUMN = view("select.int", 1, 1, shape=(4,), stride=(4,))
FIRST_COLUMNS = view("slice.Tensor", 1, 0, 2, 1, shape=(4, 2), stride=(4, 1))


def test_an_op_reads_through_a_view_of_shards():
    found = plan(through(RELU, (TRANSPOSED,)), "dp, -")
    assert (show(found), steps(found)) == ("0 1 2 3: a -> [-, dp]", ["transpose as a view", "relu"])


def test_an_input_seen_through_a_view_without_a_rule_is_gathered():
    found = plan(through(RELU, (view("no_such", shape=(4, 4)),)), "dp, -")
    assert (show(found), found.gathered) == ("0 1 2 3: a>[-, -] -> [-, -]", "aten.no_such")


@pytest.mark.parametrize(
    ("path", "other"), [((), "dp, -"), ((TRANSPOSED,), "-, dp"), ((TRANSPOSED, TRANSPOSED), "dp, -")]
)
def test_a_write_through_a_view_of_shards_is_written_back_to_its_base(path, other):
    found = plan(through(ADD_, path), "dp, -", other)
    assert show(found) == "0 1 2 3: a b -> [dp, -]"
    views = ["transpose as a view"] * len(path)
    assert steps(found) == [*views, "add in place", *["write back"][: len(path)]]
    assert found.program.consumes == (0,)
    if path:
        assert found.program.steps[-1].steps == tuple([(number, 0) for number in range(len(path))])


@pytest.mark.parametrize(
    ("path", "shape", "text"), [(COLUMN, (4,), "dp, -"), (ROW, (4,), "-, tp"), (FIRST_COLUMNS, (4, 2), "dp, -")]
)
def test_a_write_to_a_part_of_every_shard_moves_nothing(path, shape, text):
    other = whole(MESH, len(shape))
    found = plan(through(ADD_, (path,)), text, other, metas=[SQUARE, meta(*shape)])
    assert found.results == ((SQUARE, parse_spec(text, MESH)),)
    assert (steps(found)[-2:], found.collectives) == (["add in place", "write back"], ())


def test_a_write_that_reads_another_view_of_its_target_runs_whole():
    """The views may overlap, and then the shards are not enough."""
    op = through(ADD_, (), (TRANSPOSED,))
    found = plan(op, "dp, -", "dp, -", aliased_inputs={1: 0})
    assert steps(found) == ["move [dp, -] to [-, -]", "whole add_", "move [-, -] to [dp, -]"]
    assert show(found) == "0 1 2 3: a -> [dp, -]"
    assert found.program.steps[1].inputs == (2, 2)  # both are views of one tensor, as in the program of the user
    assert plan(op, "dp, -", "-, dp").gathered == ""


@pytest.mark.parametrize("target", ["dp, -", "-, tp", "dp, tp", "tp dp, -", "-, -"])
@pytest.mark.parametrize("other", ["dp, -", "-, tp", "dp, tp", "-, -", "- , - + tp"])
def test_a_write_keeps_the_layout_of_its_target(target, other):
    found = plan(ADD_, target, other)
    assert found.results == ((SQUARE, parse_spec(target, MESH)),)
    assert found.sources[0] == (0, None)
    assert [spec for position, spec in found.sources if position == 1] in ([None], [parse_spec(target, MESH)])


def test_a_write_to_shards_is_done_in_place():
    found = plan(ADD_, "dp, -", "dp, -")
    (step,) = found.program.steps
    assert (step.op, step.in_place.op, step.inputs, step.outputs, step.into) == (
        "aten.add.Tensor",
        "aten.add_.Tensor",
        (0, 1),
        (0,),
        (0,),
    )
    assert (found.program.takes, found.program.gives, found.program.consumes) == ((0, 1), (0,), (0,))


def test_a_partial_target_is_reduced_first():
    found = plan(ADD_, "dp, - + tp", "dp, -")
    assert steps(found) == ["move [dp, - + tp] to [dp, -]", "add in place"]
    assert (show(found), kinds(found)) == ("0 1 2 3: a b -> [dp, -]", ["all-reduce"])


def test_partial_values_are_added_to_a_partial_target_as_it_is():
    found = plan(ADD_, "dp, - + tp", "dp, - + tp")
    assert steps(found) == ["add in place"]
    assert (show(found), kinds(found)) == ("0 1 2 3: a b -> [dp, - + tp]", [])


def test_a_write_without_a_rule_restores_the_layout_of_its_target():
    found = plan(NO_RULE_, "dp, -")
    assert steps(found) == ["move [dp, -] to [-, -]", "whole no_such_", "move [-, -] to [dp, -]"]
    assert (show(found), kinds(found)) == ("0 1 2 3: a -> [dp, -]", ["all-gather"])
    assert found.gathered == "aten.no_such.default"


def test_a_write_without_a_functional_form_runs_whole():
    found = plan(msgspec.structs.replace(ADD_, functional=""), "dp, -", "dp, -")
    assert found.gathered
    assert found.results == ((SQUARE, parse_spec("dp, -", MESH)),)


def test_out_is_written_in_the_layout_it_has():
    found = plan(ADD_OUT, "dp, -", "dp, -", "dp, -")
    (step,) = found.program.steps
    assert show(found) == "0 1 2 3: a b c -> [dp, -]"
    assert (step.op, step.inputs, step.into) == ("aten.add.Tensor", (0, 1, 2), (2,))
    assert (step.in_place.op, step.in_place.kwargs, step.in_place.writes) == ("aten.add.out", {"out": Input(2)}, (2,))
    assert found.program.consumes == (2,)


@pytest.mark.parametrize("out", ["-, tp", "dp, tp", "-, -", "-, - + dp"])
def test_out_keeps_its_layout_whatever_the_operands_have(out):
    found = plan(ADD_OUT, "dp, -", "dp, -", out)
    assert found.results == ((SQUARE, parse_spec(out, MESH).replace(partial=())),)
    assert "add" in " ".join(steps(found)) and not found.gathered
