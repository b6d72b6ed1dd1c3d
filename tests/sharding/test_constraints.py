"""Constraints print and parse, and are keys."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.core.errors import LayoutError
from gt.sharding.constraints import Constraint, DimConstraint, satisfy
from gt.sharding.spec import REDUCTIONS, DeviceMesh, ShardingSpec
from gt.sharding.spec_text import parse_constraint, parse_spec

MESH = DeviceMesh([2, 3, 2], ["dp", "tp", "pp"])


@pytest.mark.parametrize(
    ("written", "printed", "dims"),
    [
        ("dp, -", "dp, -", [DimConstraint(("dp",), False), DimConstraint((), False)]),
        ("dp?,-?", "dp?, -?", [DimConstraint(("dp",)), DimConstraint()]),
        ("dp  tp?@2", "dp tp?@2", [DimConstraint(("dp", "tp"), True, 2)]),
        ("tp dp@1", "tp dp@1", [DimConstraint(("tp", "dp"), False, 1)]),
        ("dp ?@0", "dp?", [DimConstraint(("dp",))]),
        ("-?@12", "-?@12", [DimConstraint((), True, 12)]),
        ("", "", []),
    ],
)
def test_constraints_are_parsed_as_people_write_them(written, printed, dims):
    constraint = parse_constraint(written, MESH)
    assert constraint == Constraint(MESH, tuple(dims))
    assert str(constraint) == printed


@pytest.mark.parametrize(
    ("written", "printed"),
    [("dp? + tp", "dp? + tp"), ("-+pp  dp : max", "- + dp pp:max"), ("+ tp", "+ tp"), ("-? + tp:sum", "-? + tp")],
)
def test_constraints_may_ask_for_partial_values(written, printed):
    assert str(parse_constraint(written, MESH)) == printed


@st.composite
def constraints(draw):
    rank = draw(st.integers(0, 3))
    positions = dict(
        zip(MESH.axis_names, draw(st.lists(st.integers(-2, rank - 1), min_size=3, max_size=3)), strict=True)
    )
    dims = [
        DimConstraint(
            tuple([axis for axis, at in positions.items() if at == dim]), draw(st.booleans()), draw(st.integers(0, 3))
        )
        for dim in range(rank)
    ]
    partial = tuple([axis for axis, at in positions.items() if at == -2])
    return Constraint(MESH, tuple(dims), partial, draw(st.sampled_from(REDUCTIONS)) if partial else "sum")


@given(constraints(), constraints())
@settings(max_examples=100, deadline=None)
def test_a_constraint_comes_back_from_its_text_and_is_its_key(one, other):
    again = parse_constraint(str(one), MESH)
    assert again == one and hash(again) == hash(one)
    assert (one == other) == (str(one) == str(other))


def test_a_constraint_is_not_a_spec():
    constraint, spec = parse_constraint("dp, -", MESH), parse_spec("dp, -", MESH)
    assert str(constraint) == str(spec) and constraint != spec
    assert not isinstance(constraint, ShardingSpec)


def test_an_unconstrained_dim_is_open():
    assert DimConstraint() == DimConstraint((), True, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ep?", r"mesh \(dp=2, tp=3, pp=2\) has no axis 'ep'; it has dp, tp, pp"),
        ("- + ep", "has no axis 'ep'"),
        ("dp, dp?", "'dp' is used twice in one spec"),
        ("dp + dp", "'dp' is used twice"),
        ("- + dp:mean", "'mean' is no reduction"),
        ("dp? +", r"names no axis after '\+'"),
        ("?", r"'\?' in '\?' is not a dim of a spec: expected axis names or '-', then '\?' if open, then '@' and a"),
        ("dp@", "'dp@' in 'dp@' is not a dim"),
        ("dp@-1", "'dp@-1' in 'dp@-1' is not a dim"),
        ("dp@1?", r"'dp@1\?' in 'dp@1\?' is not a dim"),
        ("dp[0:1 1:2]", "is not a dim"),  # cuts belong to specs
        ("dp,", "'' in 'dp,' is not a dim"),
    ],
)
def test_constraints_that_make_no_sense(text, message):
    with pytest.raises(LayoutError, match=message):
        parse_constraint(text, MESH)


@pytest.mark.parametrize(
    ("constraint", "given", "expected"),
    [
        ("dp?, -?", "-, -", "dp, -"),
        ("dp?, -?", "tp, -", "tp dp, -"),  # what is cut already is cut further
        ("dp?, -?", "dp tp, pp", "dp tp, pp"),
        ("dp, -?", "tp, pp", "dp, pp"),
        ("dp?, -?", "-, dp", "dp, -"),
        ("dp?, -", "tp, pp", "tp dp, -"),
        ("dp tp?, -?", "tp dp, -", "tp dp, -"),
        ("dp?, -?", "-, - + dp", "dp, -"),
        ("dp?, -?", "-, - + tp", "dp, - + tp"),
    ],
)
def test_satisfy_gives_the_nearest_layout(constraint, given, expected):
    assert str(satisfy(parse_constraint(constraint, MESH), parse_spec(given, MESH))) == expected
