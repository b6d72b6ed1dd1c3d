"""Plans as text (see plan_text.py). `16@0 8@1` are inputs of 16 and 8 bytes, each whole on one worker; other inputs are
layouts, mostly over the mesh of `dp` by `tp`."""

import msgspec
import pytest

from gt.core.signatures import Input, ListArg, Scalar, Signature
from gt.dispatcher import planner
from gt.dispatcher.planner import plan_move, plan_op
from gt.sharding.spec import DeviceMesh, whole
from gt.sharding.spec_text import parse_spec
from tests.dispatcher.plan_text import ADD, ADD_, MESH, MM, NO_RULE, OTHER, RELU, SQUARE, plan, show, steps
from tests.dispatcher_harness import at, solo_mesh
from tests.records import meta, signature


def plan_whole(inputs, writes=()):
    """The plan for an op on whole tensors, some of them on several workers."""
    metas, specs = [], []
    for text in inputs.split():
        size, _, homes = text.partition("@")
        workers = [int(worker) for worker in homes.split(",")]
        metas.append(meta(int(size), dtype="uint8"))
        specs.append(whole(DeviceMesh([len(workers)], ["w"], workers), 1))
    op = signature("aten.no_such.default", len(metas), (meta(1),), writes)
    found = plan_op(op, metas, specs, solo_mesh(0))
    assert (found.program, found.gathered) == (None, "")
    return show(found).replace("[-]", "").partition(" ->")[0]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("16@1 16@1", "1: a b"),  # together: nothing moves
        ("16@0 8@1", "0: a b>"),  # apart: the smaller moves
        ("8@0 16@1", "1: a> b"),
        ("16@2 16@1", "1: a> b"),  # equal: they meet at the lowest id
        ("8@0 6@1 6@1", "1: a> b c"),  # two small ones outweigh a larger
        ("8@0 4@1 4@2", "0: a b> c>"),
        ("0@0 8@1", "1: a> b"),  # empty tensors cost nothing, and are moved all the same
        ("16@0,1 8@1", "0 1: a b>"),
        ("8@0,1 16@1", "1: a> b"),
        ("8@1 8@0,1", "0 1: a> b"),  # equal: where more workers are
    ],
)
def test_an_op_runs_where_most_of_its_inputs_are(inputs, expected):
    assert plan_whole(inputs) == expected


@pytest.mark.parametrize("op", [ADD, MM, RELU, NO_RULE], ids=lambda op: op.op)
@pytest.mark.parametrize("mesh", [solo_mesh(1), MESH, OTHER], ids=str)
def test_whole_inputs_need_no_search(op, mesh, monkeypatch):
    """The short way gives the plan that the search for the cheapest one gives."""
    metas = [meta(4, 4)] * len(op.paths)
    specs = [whole(mesh, 2)] * len(metas)
    short = plan_op(op, metas, specs, solo_mesh(0))
    monkeypatch.setattr(planner, "whole", lambda *_: None)
    assert plan_op(op, metas, specs, solo_mesh(0)) == short


@pytest.mark.parametrize(
    ("inputs", "writes", "expected"),
    [
        ("16@1 8@1", (0,), "1: a b"),
        ("8@0 16@1", (0,), "0: a b>"),  # however large the other is
        ("16@1 8@0", (1,), "0: a> b"),
        ("8@0 16@1 8@0", (0, 2), "0: a b> c"),
    ],
)
def test_an_op_that_writes_runs_where_its_target_is(inputs, writes, expected):
    assert plan_whole(inputs, writes) == expected


def test_an_op_without_inputs_runs_where_it_is_told():
    op = signature("aten.zeros.default", 0, (SQUARE,))
    assert show(plan_op(op, [], [], solo_mesh(2))) == "2:  -> [-, -]"


def test_written_inputs_must_be_on_one_mesh():
    op = signature("aten.no_such.default", 2, writes=(0, 1))
    with pytest.raises(AssertionError, match="on one mesh"):
        plan(op, at(0, 2), at(1, 2))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("dp, -", "-, tp", "a b -> [dp, tp]"),  # rows by columns
        ("dp, -", "-, -", "a b -> [dp, -]"),
        ("-, dp tp", "dp tp, -", "a b -> [-, - + dp tp]"),  # a split contraction gives partial sums
        ("dp, tp", "tp, -", "a b -> [dp, - + tp]"),
        ("-, - + tp", "-, -", "a b -> [-, - + tp]"),  # partial sums pass
    ],
)
def test_a_matmul_that_fits_moves_nothing(left, right, expected):
    found = plan(MM, left, right)
    assert show(found) == f"0 1 2 3: {expected}"
    assert (steps(found), found.collectives, found.gathered) == (["mm"], (), "")


@pytest.mark.parametrize(
    ("op", "layouts", "expected"),
    [
        (ADD, ("dp, -", "dp, -"), "a b -> [dp, -]"),
        (ADD, ("dp, tp", "dp, -"), "a b>[dp, tp] -> [dp, tp]"),  # slicing moves no bytes
        (ADD, ("-, - + dp", "-, - + dp"), "a b -> [-, - + dp]"),
        (RELU, ("dp, tp",), "a -> [dp, tp]"),
    ],
)
def test_an_op_runs_on_the_present_shards(op, layouts, expected):
    found = plan(op, *layouts)
    assert (show(found), found.collectives) == (f"0 1 2 3: {expected}", ())


def test_partial_values_are_reduced_before_an_op_that_needs_them_whole():
    found = plan(RELU, "dp, - + tp")
    ((position, spec),) = found.sources
    assert (position, spec.partial) == (0, ())
    assert found.collectives == ()  # the move is not the program's, so that what it gives can be used again


@pytest.mark.parametrize("text", ["dp, -", "-, dp tp", "dp, - + tp:max"])
def test_an_op_without_a_rule_gathers_and_says_so(text):
    found = plan(NO_RULE, text)
    assert show(found) == "0 1 2 3: a>[-, -] -> [-, -]"
    assert (found.program, found.gathered) == (None, "aten.no_such.default")


def test_an_op_without_a_rule_on_whole_tensors_gathers_nothing():
    found = plan(NO_RULE, "-, -")
    assert (show(found), found.gathered) == ("0 1 2 3: a -> [-, -]", "")
    reduced = plan(NO_RULE, "-, - + dp")
    assert (show(reduced), reduced.gathered) == ("0 1 2 3: a>[-, -] -> [-, -]", "")


def test_numbers_with_which_an_op_is_not_linear_reduce_first():
    scaled = msgspec.structs.replace(signature("aten.mul.Tensor", 1, (SQUARE,)), args=(Input(0), Scalar(0)))
    tame = plan(scaled, "-, - + dp")
    assert (show(tame), tame.linear) == ("0 1 2 3: a -> [-, - + dp]", True)
    odd = plan(scaled, "-, - + dp", reduces_first=True)
    assert (show(odd), odd.linear) == ("0 1 2 3: a>[-, -] -> [-, -]", False)


@pytest.mark.parametrize("text", ["dp, -", "-, dp tp", "tp, dp", "-, -", "-, - + dp"])
@pytest.mark.parametrize("name", ["zeros", "no_such"])
def test_a_created_tensor_has_the_layout_that_the_user_gives(text, name):
    layout = parse_spec(text, MESH)
    kwargs = {"dtype": None}
    op = Signature(f"aten.{name}.default", (ListArg((4, 4)),), kwargs, (), (), (SQUARE,), (0,), layout=layout.record())
    found = plan(op)
    assert (found.results, found.workers, found.collectives) == (((SQUARE, layout),), MESH.workers, ())


def test_an_op_gives_the_layout_that_the_user_asks_for():
    constrained = msgspec.structs.replace(MM, layout=parse_spec("dp, tp", MESH).record())
    assert show(plan(constrained, "dp, -", "-, tp")) == "0 1 2 3: a b -> [dp, tp]"
    found = plan(constrained, "-, tp", "tp, -")
    assert [spec for _, spec in found.results] == [parse_spec("dp, tp", MESH)]


def test_the_result_of_an_op_without_a_rule_is_sharded_afterwards():
    constrained = msgspec.structs.replace(NO_RULE, layout=parse_spec("dp, -", MESH).record())
    found = plan(constrained, "-, tp")
    assert show(found) == "0 1 2 3: a>[-, -] -> [dp, -]"
    assert steps(found) == ["whole no_such", "move [-, -] to [dp, -]"]


@pytest.mark.parametrize(
    ("left", "right", "workers"),
    [
        (8, 1, (0, 1, 2, 3)),
        (1, 8, (4, 5)),
        (8, 8, (0, 1, 2, 3)),  # equal: the larger mesh
    ],
)
def test_inputs_on_different_meshes_move_to_the_mesh_with_most_bytes(left, right, workers):
    op = signature("aten.add.Tensor", 2, (meta(8),))
    found = plan(op, parse_spec("dp", MESH), parse_spec("x", OTHER), metas=[meta(left), meta(right)])
    assert found.workers == workers
    assert [spec.mesh.workers for _, spec in found.results] == [workers]
    assert [spec.mesh.workers for _, spec in found.sources if spec is not None] == [workers]


def test_an_input_of_another_mesh_is_moved_to_the_layout_that_fits():
    found = plan(ADD, parse_spec("dp, -", MESH), parse_spec("-, x", OTHER))
    assert show(found) == "0 1 2 3: a b>[dp, -] -> [dp, -]"


def test_a_write_stays_on_its_mesh():
    found = plan(ADD_, parse_spec("x, -", OTHER), parse_spec("dp, -", MESH))
    assert show(found) == "4 5: a b>[x, -] -> [x, -]"


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("dp tp, -", "-, -", [("all-gather", ("dp", "tp"), 3 * 64)]),
        ("-, -", "dp, tp", []),
        ("dp, -", "-, dp", [("all-to-all", ("dp",), 64)]),
        ("-, - + dp tp", "dp tp, -", [("reduce-scatter", ("dp", "tp"), 3 * 64)]),
    ],
)
def test_a_move_names_its_collectives(source, target, expected):
    found = plan_move(SQUARE, parse_spec(source, MESH), parse_spec(target, MESH))
    assert [(c.kind, c.axes, c.nbytes) for c in found.collectives] == expected
    assert {c.op for c in found.collectives} <= {"redistribute"}
    assert (show(found), found.gathered) == (f"0 1 2 3: a -> [{target}]", "")


def test_a_move_between_meshes_takes_the_workers_of_both():
    assert plan_move(SQUARE, parse_spec("x, -", OTHER), parse_spec("dp, -", MESH)).workers == (4, 5, 0, 1, 2, 3)
    assert plan_move(SQUARE, parse_spec("dp, -", MESH), at(2, 2)).workers == (0, 1, 2, 3)
