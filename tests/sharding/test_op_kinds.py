"""Kinds of ops: from the families of rules."""

import pytest

from gt.sharding.op_kinds import _FAMILIES, op_kind
from gt.sharding.rules import TABLES


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten.mm.default", "contraction"),
        ("aten.convolution.default", "contraction"),
        ("aten.relu.default", "pointwise"),
        ("aten.add_.Tensor", "pointwise"),
        ("aten.sum.dim_IntList", "reduction"),
        ("aten.native_layer_norm.default", "reduction"),
        ("aten.view.default", "movement"),
        ("aten.embedding.default", "movement"),
        ("aten.randn.default", "creation"),
        ("aten._foreach_add_.List", "optimizer"),
        ("mylib.thing.default", "other"),
        ("thing", "other"),
        ("", "other"),
    ],
)
def test_the_kind_of_an_op_is_that_of_its_family(op, kind):
    assert op_kind(op) == kind


def test_families_are_tables_of_rules():
    families = [id(table) for tables in _FAMILIES.values() for table in tables]
    assert len(set(families)) == len(families)
    assert {*families} <= {id(table) for table in TABLES}
