"""Plans as text. `16@0 8@1` are inputs of 16 and 8 bytes, each whole on one worker; other inputs are layouts,
mostly over the mesh of `dp` by `tp`. A plan is `workers: inputs -> results`, where `b>[dp]` is moved to that layout
first."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.signatures import Compute, Input, ListArg, Move, Scalar, Signature, ViewStep, Whole
from gt.dispatcher.planner import plan_move, plan_op
from gt.sharding.cost import reshard_bytes
from gt.sharding.program_builder import ProgramBuilder, Register
from gt.sharding.spec import DeviceMesh, ShardingSpec, spec_of, whole
from gt.sharding.spec_text import parse_spec
from tests.dispatcher_harness import at, solo_mesh
from tests.records import meta, signature

MESH = DeviceMesh([2, 2], ["dp", "tp"], [0, 1, 2, 3])
SQUARE = meta(4, 4)
MM = signature("aten.mm.default", 2, (SQUARE,))
ADD = signature("aten.add.Tensor", 2, (SQUARE,))
ADD_ = signature("aten.add_.Tensor", 2, writes=(0,), functional="aten.add.Tensor")
RELU = signature("aten.relu.default", 1, (SQUARE,))
NO_RULE = signature("aten.no_such.default", 1, (SQUARE,))
NO_RULE_ = signature("aten.no_such_.default", 1, writes=(0,), functional="aten.no_such.default")


def plan(op, *layouts, metas=None, aliased_inputs=None, mesh=MESH, reduces_first=False):
    specs = [parse_spec(text, mesh) if isinstance(text, str) else text for text in layouts]
    return plan_op(op, metas or [SQUARE] * len(specs), specs, solo_mesh(0), aliased_inputs, reduces_first=reduces_first)


@pytest.mark.parametrize(("copies", "moved"), [((), 32), (("-, tp",), 32), (("-, -",), 0)])
def test_an_input_with_a_copy_in_the_needed_layout_does_not_move(copies, moved):
    source, target = parse_spec("dp, -", MESH), parse_spec("-, -", MESH)
    draft = ProgramBuilder(MESH, [Register(SQUARE, source, tuple([parse_spec(text, MESH) for text in copies]))])
    assert draft.spec(draft.move(0, target)) is target
    assert draft.bytes == moved * 4


def show(found):
    """`0 1: a b>[dp] -> [dp]`"""
    takes = [chr(97 + position) + (f">[{spec}]" if spec is not None else "") for position, spec in found.takes]
    results = [f"[{spec}]" for _, spec in found.results]
    return f"{' '.join(map(str, found.workers))}: {' '.join(takes)} -> {' '.join(results)}"


def steps(found):
    """The steps of a program as text."""
    return [_step(step) for step in found.program.steps]


def _step(step):
    if isinstance(step, Move):
        return f"move [{spec_of(step.source)}] to [{spec_of(step.target)}]"
    if isinstance(step, Compute):
        how = " in place" if step.in_place is not None else " as a view" if step.is_view else ""
        return step.op.split(".")[1] + how
    return "whole " + step.signature.op.split(".")[1] if isinstance(step, Whole) else "write back"


def kinds(found):
    return [collective.kind for collective in found.collectives]


# Tensors that are whole


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


# Shards


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
    ((position, spec),) = found.takes
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


# Views


def through(op, *paths):
    """The same op on views of its inputs."""
    return msgspec.structs.replace(op, paths=paths + ((),) * (len(op.paths) - len(paths)))


def view(name, *args, shape, stride=None):
    result = meta(*shape) if stride is None else msgspec.structs.replace(meta(*shape), stride=stride)
    return ViewStep(f"aten.{name}", args, {}, None, None, (result,))


TRANSPOSED = view("transpose.int", 0, 1, shape=(4, 4), stride=(1, 4))
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


# Writes


@pytest.mark.parametrize("target", ["dp, -", "-, tp", "dp, tp", "tp dp, -", "-, -"])
@pytest.mark.parametrize("other", ["dp, -", "-, tp", "dp, tp", "-, -", "- , - + tp"])
def test_a_write_keeps_the_layout_of_its_target(target, other):
    found = plan(ADD_, target, other)
    assert found.results == ((SQUARE, parse_spec(target, MESH)),)
    assert found.takes[0] == (0, None)
    assert [spec for position, spec in found.takes if position == 1] in ([None], [parse_spec(target, MESH)])


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


def test_a_write_without_a_rule_restores_the_layout_of_its_target():
    found = plan(NO_RULE_, "dp, -")
    assert steps(found) == ["move [dp, -] to [-, -]", "whole no_such_", "move [-, -] to [dp, -]"]
    assert (show(found), kinds(found)) == ("0 1 2 3: a -> [dp, -]", ["all-gather"])
    assert found.gathered == "aten.no_such.default"


def test_a_write_without_a_functional_form_runs_whole():
    found = plan(msgspec.structs.replace(ADD_, functional=""), "dp, -", "dp, -")
    assert found.gathered
    assert found.results == ((SQUARE, parse_spec("dp, -", MESH)),)


ADD_OUT = Signature(
    "aten.add.out", (Input(0), Input(1)), {"out": Input(2)}, ((),) * 3, (2,), (), (), functional="aten.add.Tensor"
)


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


# What the user says


@pytest.mark.parametrize("text", ["dp, -", "-, dp tp", "tp, dp", "-, -", "-, - + dp"])
@pytest.mark.parametrize("name", ["zeros", "no_such"])
def test_a_created_tensor_has_the_layout_that_the_user_gives(text, name):
    layout = parse_spec(text, MESH)
    kwargs = {"dtype": None}
    op = Signature(f"aten.{name}.default", (ListArg((4, 4)),), kwargs, (), (), (SQUARE,), (0,), layout=layout.record())
    found = plan(op)
    assert (found.results, found.workers, found.collectives) == (((SQUARE, layout),), MESH.workers, ())


def test_an_op_gives_the_layout_that_the_user_asks_for():
    wished = msgspec.structs.replace(MM, layout=parse_spec("dp, tp", MESH).record())
    assert show(plan(wished, "dp, -", "-, tp")) == "0 1 2 3: a b -> [dp, tp]"
    found = plan(wished, "-, tp", "tp, -")
    assert [spec for _, spec in found.results] == [parse_spec("dp, tp", MESH)]


def test_the_result_of_an_op_without_a_rule_is_sharded_afterwards():
    wished = msgspec.structs.replace(NO_RULE, layout=parse_spec("dp, -", MESH).record())
    found = plan(wished, "-, tp")
    assert show(found) == "0 1 2 3: a>[-, -] -> [dp, -]"
    assert steps(found) == ["whole no_such", "move [-, -] to [dp, -]"]


# Several meshes


OTHER = DeviceMesh([2], ["x"], [4, 5])


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
    assert [spec.mesh.workers for _, spec in found.takes if spec is not None] == [workers]


def test_an_input_of_another_mesh_is_moved_to_the_layout_that_fits():
    found = plan(ADD, parse_spec("dp, -", MESH), parse_spec("-, x", OTHER))
    assert show(found) == "0 1 2 3: a b>[dp, -] -> [dp, -]"


def test_a_write_stays_on_its_mesh():
    found = plan(ADD_, parse_spec("x, -", OTHER), parse_spec("dp, -", MESH))
    assert show(found) == "4 5: a b>[x, -] -> [x, -]"


# Moves


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
    assert [(c.kind, c.axes, c.bytes) for c in found.collectives] == expected
    assert {c.op for c in found.collectives} <= {"redistribute"}
    assert (show(found), found.gathered) == (f"0 1 2 3: a -> [{target}]", "")


def test_a_move_between_meshes_takes_the_workers_of_both():
    assert plan_move(SQUARE, parse_spec("x, -", OTHER), parse_spec("dp, -", MESH)).workers == (4, 5, 0, 1, 2, 3)
    assert plan_move(SQUARE, parse_spec("dp, -", MESH), at(2, 2)).workers == (0, 1, 2, 3)


# Laws


@st.composite
def layouts(draw, rank=2):
    dims: list[list[str]] = [[] for _ in range(rank)]
    partial = []
    mesh = draw(st.sampled_from([MESH, MESH, OTHER, solo_mesh(1)]))
    for axis in draw(st.permutations(mesh.axis_names)):
        use = draw(st.integers(-2, rank - 1))
        if use >= 0:
            dims[use].append(axis)
        elif use == -1:
            partial.append(axis)
    return ShardingSpec(mesh, dims, partial)


PATHS = st.sampled_from([(), (), (TRANSPOSED,), (TRANSPOSED, TRANSPOSED)])


@st.composite
def situations(draw):
    """An op through views, and the layouts of its inputs; written inputs are on one mesh."""
    op = draw(st.sampled_from([MM, ADD, ADD_, RELU, NO_RULE, NO_RULE_, ADD_OUT]))
    count = len(op.paths)
    specs = [draw(layouts()) for _ in range(count)]
    alike = bool(op.writes) and count > 1 and draw(st.booleans())
    aliased_inputs = {position: op.writes[0] for position in range(count) if alike and position not in op.writes}
    if alike:
        specs = [specs[0]] * count
    return through(op, *[draw(PATHS) for _ in range(count)]), [SQUARE] * count, specs, solo_mesh(0), aliased_inputs


@given(situations())
def test_planning_is_deterministic(situation):
    assert repr(plan_op(*situation)) == repr(plan_op(*situation))


@given(situations())
def test_a_plan_fits_its_op(situation):
    op, metas, specs, *_ = situation
    found = plan_op(*situation)
    assert [result for result, _ in found.results] == [*op.outputs, *[metas[position] for position in op.writes]]
    (mesh,) = {spec.mesh for _, spec in found.results}
    assert found.workers == mesh.workers
    taken = [(position, spec or specs[position]) for position, spec in found.takes]
    assert all(spec.mesh is mesh for _, spec in taken), "everything is brought to where the op runs"
    if found.program is not None:
        assert len(found.program.takes) == len(found.takes)
        assert len(found.program.gives) == len(found.results)
        assert [found.takes[position] for position in found.program.consumes] == [
            (position, None) for position in op.writes
        ]


@given(situations())
def test_a_written_tensor_keeps_its_layout(situation):
    """A partial target is reduced."""
    op, _, specs, *_ = situation
    kept = [spec for _, spec in plan_op(*situation).results[len(op.outputs) :]]
    before = [specs[position] for position in op.writes]
    assert all(new is old or (old.partial and not new.partial) for old, new in zip(before, kept, strict=True))


@given(situations())
def test_no_op_moves_more_than_gathering_would(situation):
    op, metas, specs, *_ = situation
    found = plan_op(*situation)
    mesh = found.results[0][1].mesh
    before = [
        plan_move(metas[position], specs[position], spec).collectives
        for position, spec in found.takes
        if spec is not None
    ]
    moved = sum(collective.bytes for collectives in [*before, found.collectives] for collective in collectives)
    assert moved <= sum(reshard_bytes(SQUARE.shape, 4, spec, whole(mesh, 2)) for spec in specs)
