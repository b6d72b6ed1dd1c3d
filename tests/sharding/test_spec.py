"""Specs: the shard of each worker, compared with NumPy's splits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gt.core.errors import LayoutError
from gt.core.meta import TensorMeta
from gt.sharding.placements import spec_from
from gt.sharding.reshard import plan_reshard
from gt.sharding.spec import (
    DeviceMesh,
    ShardingSpec,
    compute_global_shape,
    compute_local_shape,
    largest_local_shape,
    local_box,
    local_slices,
    shard_index,
    whole,
)
from gt.sharding.spec_text import parse_spec
from tests.sharding.generators import CUBE, GRID, SHAPES, TURNED, laws, layouts, meshes, other_cuts, specs


def test_replace_changes_only_the_named_fields():
    spec = parse_spec("dp[0:1 1:9], - + tp:max", GRID)
    assert str(spec.replace(partial=())) == "dp[0:1 1:9], -"
    assert str(spec.replace(kind="min")) == "dp[0:1 1:9], - + tp:min"
    assert str(spec.replace(cuts=())) == "dp, - + tp:max"
    assert str(spec.replace(dims=[[], ["dp"]], cuts=())) == "-, dp + tp:max"
    assert spec.replace(mesh=TURNED).mesh is TURNED
    assert str(spec) == "dp[0:1 1:9], - + tp:max"


def test_the_reduction_of_a_spec_without_partial_axes_does_not_matter():
    assert ShardingSpec(GRID, [["dp"]], kind="max") is ShardingSpec(GRID, [["dp"]])


@given(layouts())
@laws
def test_a_normal_spec_has_no_usual_cuts(layout):
    spec, shape = layout
    usual = spec.replace(cuts=())
    spelled = spec.replace(cuts=[spec.intervals(shape, dim) for dim in range(len(shape))])
    assert usual.replace(cuts=[usual.intervals(shape, dim) for dim in range(len(shape))]).normal(shape) is usual
    assert spelled.normal(shape) is spec.normal(shape)
    assert [spec.normal(shape).intervals(shape, dim) for dim in range(len(shape))] == [
        spec.intervals(shape, dim) for dim in range(len(shape))
    ]


def test_properties_of_a_spec():
    spec = parse_spec("pp dp, -, tp", CUBE)
    assert (spec.axes, spec.counts(0), spec.shards(0), spec.shards(1)) == (("pp", "dp", "tp"), (2, 2), 4, 1)
    assert spec.intervals((6, 5, 4), 0) == ((0, 2), (2, 3), (3, 5), (5, 6))
    assert not spec.is_whole and not parse_spec("- + dp", CUBE).is_whole
    assert whole(CUBE, 2) is parse_spec("-, -", CUBE) and whole(CUBE, 2).is_whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp, -", r"mesh \(dp=2, tp=3\) has no axis 'pp'; it has dp, tp"),
        ("- + pp", "has no axis 'pp'"),
        ("dp, dp", "axis 'dp' is used twice in one spec: an axis cuts one dim, or is partial"),
        ("dp dp", "'dp' is used twice"),
        ("dp + dp", "'dp' is used twice"),
        ("- + dp dp", "'dp' is used twice"),
        ("- + dp:mean", "'mean' is no reduction of a partial tensor; there are sum, max, min, prod, and, or"),
        ("dp, - +", r"'dp, - \+' names no axis after '\+'; write for example 'dp, - \+ tp'"),
        ("dp, , -", "'' in 'dp, , -' is not a dim of a spec: expected axis names or '-'"),
        ("dp, 3", "'3' in 'dp, 3' is not a dim"),
        ("dp - tp", "'dp - tp' in 'dp - tp' is not a dim"),
        ("dp?, -", "'dp\\?' in 'dp\\?, -' is not a dim"),
        ("dp[0:3]", r"1 intervals do not fit a dim cut by dp of mesh \(dp=2, tp=3\)"),
        ("dp[0:3 3]", r"\[0:3 3\] is not a list of intervals such as \[0:3 3:4\]"),
        ("dp[0:3 3:]", r"\[0:3 3:\] is not a list of intervals"),
        ("dp[0:3 4:1]", "4:1 is no interval of a dim cut by dp"),
    ],
)
def test_invalid_specs_are_refused(text, message):
    with pytest.raises(LayoutError, match=message):
        parse_spec(text, GRID)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_complex_numbers_have_no_largest(kind):
    meta = TensorMeta((2,), (1,), 0, "complex64")
    told = rf"\[- \+ dp:{kind}\] takes the {kind} .* complex64, which has no order: make it partial by sum or prod"
    with pytest.raises(LayoutError, match=told):
        spec_from(f"- + dp:{kind}", GRID, meta)
    assert str(spec_from("- + dp:prod", GRID, meta)) == "- + dp:prod"


def test_cuts_are_those_of_all_dims_or_none():
    with pytest.raises(LayoutError, match="cuts of 1 dims do not fit a spec of 2 dims"):
        ShardingSpec(GRID, [["dp"], []], cuts=[None])
    with pytest.raises(LayoutError, match="-1:2 is no interval"):
        ShardingSpec(GRID, [["dp"]], cuts=[((-1, 2), (2, 3))])


def split(spec, shape, worker):
    """What a worker holds of each dim, by NumPy's splits, axis by axis."""
    along = dict(zip(spec.mesh.axis_names, spec.mesh.coordinate(worker), strict=True))
    for dim, size in enumerate(shape):
        held = np.arange(size)
        for axis in spec.dims[dim]:
            held = np.array_split(held, spec.mesh.axis_size(axis))[along[axis]]
        yield held.tolist()


@given(meshes, SHAPES, st.data())
@laws
def test_shards_are_those_of_nested_splits(mesh, shape, data):
    spec = data.draw(specs(mesh, len(shape)))
    for worker in mesh.workers:
        positions = [
            list(range(size))[part] for size, part in zip(shape, local_slices(spec, shape, worker), strict=True)
        ]
        assert positions == list(split(spec, shape, worker))


@given(layouts())
@example((parse_spec("tp dp", GRID), (3,)))  # six shards, three of them empty
@example((parse_spec("dp[0:0 0:0], -", GRID), (0, 4)))
@laws
def test_shards_partition_the_tensor(layout):
    spec, shape = layout
    held = {}
    for worker in spec.mesh.workers:
        slices = local_slices(spec, shape, worker)
        assert np.zeros(shape)[slices].shape == compute_local_shape(spec, shape, worker)
        held.setdefault(tuple([shard_index(spec, dim, worker) for dim in range(len(shape))]), []).append(slices)
    covered = np.zeros(shape, dtype=int)
    for copies in held.values():
        assert len(copies) == spec.mesh.size // len(held) and len(set(map(str, copies))) == 1
        covered[copies[0]] += 1
    assert len(held) == math.prod([spec.shards(dim) for dim in range(len(shape))])
    assert (covered == 1).all()


@given(layouts())
@laws
def test_a_shape_comes_back_from_its_shards(layout):
    spec, shape = layout
    locals_ = {worker: compute_local_shape(spec, shape, worker) for worker in spec.mesh.workers}
    assert compute_global_shape(spec, locals_) == shape
    assert largest_local_shape(spec, shape) == tuple(map(max, zip(*locals_.values(), strict=True)))


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("dp", {0: (3,), 1: (3,)}, r"dim 0 of dp has 2 shards; shapes of 1 were given"),
        ("dp", {0: (2,), 3: (3,)}, r"worker 0 holds \(2,\), but its shard of \[5\] by dp is \(3,\)"),
        ("dp, -", {0: (2, 4), 3: (2, 5)}, r"worker 0 holds \(2, 4\), but its shard of \[4, 5\] by dp, - is \(2, 5\)"),
        ("dp", {0: (3,), 1: (2,), 3: (2,)}, "worker 0 holds|worker 1 holds"),
    ],
)
def test_shards_that_do_not_fit(text, shapes, message):
    with pytest.raises(LayoutError, match=message):
        compute_global_shape(parse_spec(text, GRID), shapes)


@pytest.mark.parametrize(
    ("text", "index"),
    [("dp tp", "0 1 2 3 4 5"), ("tp dp", "0 2 4 1 3 5"), ("tp", "0 1 2 0 1 2"), ("dp", "0 0 0 1 1 1"), ("-", "0 " * 6)],
)
def test_shards_count_the_last_axis_of_a_dim_fastest(text, index):
    spec = parse_spec(text, TURNED)
    assert [shard_index(spec, 0, worker) for worker in TURNED.workers] == list(map(int, index.split()))


PAIR, OTHER, FLAT = (
    DeviceMesh([2], [axis], workers) for axis, workers in (("x", [0, 1]), ("x", [2, 3]), ("y", [0, 1]))
)
LONG = DeviceMesh([2, 1], ["x", "y"])


@given(meshes, SHAPES, st.data())
@laws
def test_a_reshard_that_is_not_needed_moves_nothing(mesh, shape, data):
    source, target = (data.draw(other_cuts(data.draw(specs(mesh, len(shape))), shape)) for _ in range(2))
    held = [[local_box(spec, shape, worker) for worker in mesh.workers] for spec in (source, target)]
    assert plan_reshard(shape, 4, source, source).bytes == 0
    if held[0] == held[1] and (source.partial, source.kind) == (target.partial, target.kind):
        assert plan_reshard(shape, 4, source, target).bytes == 0
