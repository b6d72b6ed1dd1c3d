"""Specs as text."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.signatures import SpecRecord
from gt.sharding.spec import spec_of
from gt.sharding.spec_text import parse_spec
from tests.sharding.generators import GRID, SHAPES, laws, layouts, meshes, specs


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("dp,-", "dp, -"),
        ("  dp ,  - ", "dp, -"),
        ("dp   tp, -", "dp tp, -"),
        ("tp dp, -", "tp dp, -"),
        ("-,-", "-, -"),
        ("", ""),
        ("+ dp", "+ dp"),
        ("dp,-+tp", "dp, - + tp"),
        ("- + tp dp", "- + dp tp"),  # partial axes have no order
        ("- + tp : max", "- + tp:max"),
        ("- + tp:sum", "- + tp"),
        ("dp[0:1 1:9] , -", "dp[0:1 1:9], -"),
        ("dp [ 0:1  1:9 ]", "dp[0:1 1:9]"),
        ("-[0:4]", "-"),  # what is not cut has no cuts
    ],
)
def test_specs_are_read_as_people_write_them(written, printed):
    spec = parse_spec(written, GRID)
    assert str(spec) == printed
    assert parse_spec(printed, GRID) is spec


def test_a_spec_shows_its_mesh_where_it_is_alone():
    assert repr(parse_spec("dp, - + tp:max", GRID)) == "ShardingSpec('dp, - + tp:max' on (dp=2, tp=3))"


@given(layouts())
@laws
def test_a_spec_comes_back_from_its_text_and_its_record(layout):
    spec, _ = layout
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(spec.record()), type=SpecRecord)
    assert parse_spec(str(spec), spec.mesh) is spec
    assert spec_of(wire) is spec
    assert pickle.loads(pickle.dumps(spec)) is spec is copy.deepcopy(spec)
    assert spec.replace() is spec and hash(spec.replace()) == hash(spec)


@given(meshes, SHAPES, st.data())
@laws
def test_specs_with_other_texts_are_other_objects(mesh, shape, data):
    one, other = data.draw(specs(mesh, len(shape))), data.draw(specs(mesh, len(shape)))
    assert (one == other) == (one is other) == (str(one) == str(other))
