"""Properties of all plans: deterministic, complete, and never dearer than gathering."""

from hypothesis import given
from hypothesis import strategies as st

from gt.dispatcher.planner import plan_move, plan_op
from gt.sharding.cost import reshard_bytes
from gt.sharding.spec import ShardingSpec, whole
from tests.dispatcher.plan_text import (
    ADD,
    ADD_,
    ADD_OUT,
    MESH,
    MM,
    NO_RULE,
    NO_RULE_,
    OTHER,
    RELU,
    SQUARE,
    TRANSPOSED,
    through,
)
from tests.dispatcher_harness import solo_mesh


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
    taken = [(position, spec or specs[position]) for position, spec in found.sources]
    assert all(spec.mesh is mesh for _, spec in taken), "everything is brought to where the op runs"
    if found.program is not None:
        assert len(found.program.takes) == len(found.sources)
        assert len(found.program.gives) == len(found.results)
        assert [found.sources[position] for position in found.program.consumes] == [
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
        for position, spec in found.sources
        if spec is not None
    ]
    moved = sum(collective.nbytes for collectives in [*before, found.collectives] for collective in collectives)
    assert moved <= sum(reshard_bytes(SQUARE.shape, 4, spec, whole(mesh, 2)) for spec in specs)
