"""Core ops run on shards, or have a reason why they cannot."""

import fnmatch
from collections import Counter

import pytest

from gt.sharding.coverage import CANNOT, DECOMPOSED, FALLBACK, RULE, aten_ops, core_ops, main, model_ops, row_of
from gt.sharding.rules import TABLE

DTENSOR = {"core": 159, "all": 1126}  # overloads with a rule in torch 2.13


@pytest.fixture(scope="module")
def rows():
    return {str(op): row_of(op) for op in aten_ops()}


def test_core_ops_have_a_rule_or_a_reason(rows):
    core = [rows[str(op)] for op in core_ops()]
    assert [row.op for row in core if row.kind == FALLBACK and not row.reason] == []
    assert sum(row.kind == RULE for row in core) > DTENSOR["core"]


def test_more_ops_have_a_rule_than_in_dtensor(rows):
    assert Counter(row.kind for row in rows.values())[RULE] > DTENSOR["all"]


@pytest.mark.parametrize("model", sorted(model_ops()))
def test_a_training_step_runs_on_shards(rows, model):
    whole = [op for op in model_ops()[model] if rows[op].kind == FALLBACK]
    assert whole == ["aten._local_scalar_dense.default"]  # to read the loss


def test_reasons_are_for_ops_that_have_no_rule(rows):
    names = {row.op.split(".")[1] for row in rows.values() if row.kind == FALLBACK}
    assert [pattern for pattern in CANNOT if not fnmatch.filter(names, pattern)] == []


# Ops that an older or a newer torch has, and this one may not.
OTHER_VERSIONS = {
    "aten.cholesky",
    "aten._foreach_clone",
    "aten._upsample_lanczos2d_aa",
    "aten._upsample_lanczos2d_aa_backward",
}


def test_rules_are_for_existing_ops():
    known = OTHER_VERSIONS | {name for op in aten_ops() for name in (str(op), str(op.overloadpacket))}
    assert [op for op in TABLE if op.startswith("aten.") and op not in known] == []


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten.add.Tensor", RULE),
        ("aten.add_.Tensor", RULE),
        ("aten.add.out", RULE),
        ("aten.max.dim_max", RULE),  # the out= of max.dim
        ("aten.t_.default", RULE),
        ("aten.linear.default", DECOMPOSED),
        ("aten.silu_backward.default", RULE),  # a composite that has a CPU kernel
        ("aten._foreach_add_.Scalar", DECOMPOSED),
        ("aten.arange.out", FALLBACK),  # no overload gives what it writes
        ("aten.nonzero.default", FALLBACK),
    ],
)
def test_the_kind_of_an_op_in_the_coverage_table(rows, op, kind):
    assert rows[op].kind == kind


def test_the_command_lists_what_falls_back(capsys):
    main(["--core", "--missing"])
    listing, _, totals = capsys.readouterr().out.partition("\n\n")
    assert "aten.nonzero.default" in listing and "aten.add.Tensor" not in listing
    assert totals.splitlines()[1].startswith("core aten")
