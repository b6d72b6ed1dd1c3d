"""Layouts as DTensor's placements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.errors import LayoutError
from gt.core.meta import TensorMeta, contiguous_strides
from gt.sharding.placements import Partial, Replicate, Shard, placements_of, spec_from
from gt.sharding.spec_text import parse_spec
from tests.sharding.generators import (
    GRID,
    SHAPES,
    TURNED,
    laws,
    meshes,
    specs,
)


def meta_of(shape):
    return TensorMeta(shape, contiguous_strides(shape), 0, "bool")


@pytest.mark.parametrize(
    ("placements", "rank", "text"),
    [
        ([Shard(0), Shard(1)], 2, "dp, tp"),
        ([Shard(1), Shard(-1)], 2, "-, dp tp"),
        ([Replicate(), Shard(-2)], 2, "tp, -"),
        ([Partial(), Shard(0)], 2, "tp, - + dp"),
        ([Partial("max"), Partial("max")], 0, "+ dp tp:max"),
        ((Replicate(), Replicate()), 1, "-"),
        ("tp dp", 1, "tp dp"),
        (parse_spec("tp dp", GRID), 1, "tp dp"),
    ],
)
def test_layouts_in_all_their_forms(placements, rank, text):
    assert spec_from(placements, GRID, meta_of((4,) * rank)) is parse_spec(text, GRID)


@given(meshes, SHAPES, st.data())
@laws
def test_placements_say_what_a_spec_says(mesh, shape, data):
    spec = data.draw(specs(mesh, len(shape)))
    found = spec_from(placements_of(spec), mesh, meta_of(shape))
    assert [set(axes) for axes in found.dims] == [set(axes) for axes in spec.dims]  # their order has no word there
    assert (found.partial, found.kind) == (spec.partial, spec.kind)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (Shard(0), r"mesh \(dp=2, tp=3\) needs a placement for each of its 2 axes, not 1"),
        ([Shard(0)] * 3, "each of its 2 axes, not 3"),
        ([Shard(2), Replicate()], r"Shard\(dim=2\) names a dim that a tensor of 2 dims does not have"),
        ([Shard(-3), Replicate()], r"Shard\(dim=-3\) names a dim"),
        ([Partial("max"), Partial()], r"partial by different kinds at once \(dp: max, tp: sum\)"),
        ("-, - + dp:max tp:sum", "names several reductions"),
        ([Partial("mean"), Replicate()], "'mean' is no reduction"),
        (["dp", Replicate()], r"'dp' is not a placement: use gt.Shard\(dim\), gt.Replicate\(\) or gt.Partial\(\)"),
        ("dp", r"\[dp\] lays out a tensor of 1 dims, and this one has 2"),
        (parse_spec("dp, -", TURNED), r"\[dp, -\] is a spec of mesh \(dp=2, tp=3\) of workers .*, not of mesh \(dp=2"),
    ],
)
def test_invalid_layouts_are_refused(placements, message):
    with pytest.raises(LayoutError, match=message):
        spec_from(placements, GRID, meta_of((4, 4)))
