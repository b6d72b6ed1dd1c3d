"""Propagated layouts. `x?` is a dim that may be cut further, `-` one that may not be cut, `@1` a priority."""

import pytest
import torch

from gt.core.errors import LayoutError
from gt.sharding.hierarchical_propagation import run_hierarchical_propagation_pass
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_constraint
from tests.sharding.propagated_layouts import GRID, MESH, found, product, run
from tests.sharding.recording import record


@pytest.mark.parametrize(
    ("a", "b", "basic", "aggressive"),
    [
        ("-?, y?", "-?, -?", "-, -", "-, -"),
        ("x, -", "-, y", "x, y", "x, y"),  # E1: rows by columns
        ("x, y", "y, -", "x, -", "x, -"),  # E1: the second product gives partial sums
        ("x, -", "-, x", "-, -", "-, x"),  # E2: b is larger
        ("x, -", "x, -", "-, -", "x, -"),  # E3: a batch and a parameter share an axis
        ("x y, -", "-, -", "x, -", "x, -"),  # there are four rows
        ("-, -", "-, x y", "-, x y", "-, x y"),
        ("x, -", "-, x y", "-, -", "-, x y"),
    ],
)
def test_products(a, b, basic, aggressive):
    program = product((4, 32), (32, 8))
    assert found(program, {"a": a, "b": b}, "basic")["result"] == basic
    assert found(program, {"a": a, "b": b})["result"] == aggressive


def test_a_conflict_goes_to_the_larger_tensor():
    asked = {"a": "x, -", "b": "-, x"}
    assert found(product((4, 32), (32, 8)), asked)["result"] == "-, x"
    assert found(product((8, 32), (32, 4)), asked)["result"] == "x, -"


def test_operands_of_a_product_agree_on_how_the_sum_is_cut():
    assert found(product((4, 32), (32, 8)), {"a": "-, y"})["b"] == "y, -"
    assert found(product((4, 32), (32, 8)), {"b": "y, -"})["a"] == "-, y"


def test_axes_do_not_flow_along_factors_that_must_be_whole():
    program = record(lambda a, b: torch.ops.aten._cdist_forward(a, b, 2.0, None), a=(8, 8), b=(8, 8))
    assert found(program, {"a": "x, y"}) == {"a": "x, y", "b": "-, -", "result": "x, -"}


def test_operands_follow_the_layout_of_the_result():
    layouts = found(product((4, 32), (32, 8)), {"result": "x, y"})
    assert (layouts["a"], layouts["b"]) == ("x, -", "-, y")


@pytest.mark.parametrize(
    ("left", "right", "basic", "aggressive"),
    [
        ("x, y", "-?, -?", "x, y", "x, y"),
        ("x, y", "-, x", "-, -", "x, -"),  # E5: j is cut in two ways, so nobody wins it
        ("x?, -?", "x y?, -?", "x y, -", "x y, -"),
        ("x?, -?", "y?, -?", "-, -", "-, -"),
        ("x y, -", "x, y", "x, -", "x y, -"),  # what both begin with, then the one in more pieces
        ("y, -", "-, y", "-, -", "y, -"),  # as large: the first
        ("x, -", "-, x y", "-, -", "-, x y"),  # as large: the one in more pieces
        ("x, -", "-, -", "-, -", "x, -"),  # to cut what is whole costs nothing
    ],
)
def test_sums(left, right, basic, aggressive):
    program = record(lambda a, b: a + b, a=(8, 8), b=(8, 8))
    asked = {"a": left, "b": right}
    assert found(program, asked, "basic")["result"] == basic
    assert found(program, asked)["result"] == aggressive


def test_an_operand_gets_from_another_only_what_the_result_got():
    program = record(torch.addcmul, input=(8, 8), tensor1=(8, 8), tensor2=(8, 8))
    layouts = found(program, {"input": "x, -", "tensor1": "-?, x?", "result": "-, -?"})
    assert layouts == {"input": "x, -", "tensor1": "-, x", "tensor2": "-, x", "result": "-, x"}


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        ((8,), (2, 4), "x", "x, -"),
        ((8,), (2, 4), "x y", "x, y"),
        ((8,), (2, 4), "y", "-, -"),  # E4: half of an axis is no axis
        ((16,), (4, 4), "y x", "y, x"),
        ((16,), (4, 4), "x y", "x, -"),  # 4 is not 2 times 4
        ((2, 4), (8,), "x, y", "x y"),
        ((4, 4), (16,), "x, y", "x"),  # y would be strided
        ((4, 4), (16,), "-, y", "-"),
        ((3, 8), (24,), "x, -", "-"),  # 3 in two parts are not 24 in two parts
        ((8, 6), (2, 4, 6), "x, y", "x, -, y"),
        ((6, 4), (4, 6), "x, -", "x, -"),
    ],
)
def test_reshape(source, target, before, after):
    program = record(lambda a: a.view(target), a=source)
    assert found(program, {"a": before})["result"] == after


@pytest.mark.parametrize(("after", "before"), [("x, -", "x"), ("-, y", "-"), ("x, y", "x y")])
def test_reshape_backwards(after, before):
    program = record(lambda a: a.view(2, 4), a=(8,))
    assert found(program, {"result": after})["a"] == before


def test_axes_that_fit_no_factor_of_a_dim_pin_the_dim():
    mesh = DeviceMesh((2, 4, 2), ("x", "y", "z"))
    program = record(lambda a: a.view(4, 4), a=(16,))
    assert found(program, {"a": "x?", "result": "x z, -"}, mesh=mesh)["a"] == "x z"
    assert found(program, {"a": "x y?", "result": "x z, -"}, mesh=mesh)["a"] == "x y"


def test_a_dim_is_not_cut_into_more_shards_than_it_has_elements():
    program = record(lambda a, b: a + b, a=(2, 8), b=(2, 8))
    assert found(program, {"a": "y, -"})["result"] == "-, -"
    assert found(record(lambda a: a[:, :3], a=(8, 8)), {"a": "-, y"})["result"] == "-, -"


def test_uneven_dims_are_cut():
    assert found(product((7, 5), (5, 9)), {"a": "y, -", "b": "-, x"})["result"] == "y, x"


def test_slices_and_joins():
    program = record(lambda a, b: torch.cat([a[:, 1:], b], 1), a=(8, 9), b=(8, 4))
    layouts = found(program, {"a": "x, y"})
    assert (layouts["slice_1" if "slice_1" in layouts else "slice"], layouts["result"]) == ("x, y", "x, y")


def test_fused_projections():
    program = record(lambda a, w: (a @ w).chunk(3, -1), a=(8, 16), w=(16, 48))
    layouts = found(program, {"a": "x, -", "w": "-, y"})
    assert {layouts[name] for name in ("result", "result_1", "result_2")} == {"x, y"}


def test_a_bias_follows_the_sum():
    program = record(lambda a, bias: a + bias, a=(8, 8), bias=(8,))
    assert found(program, {"a": "x, y"}) == {"a": "x, y", "bias": "y", "result": "x, y"}


def test_a_bias_follows_the_layout_of_the_other_operand():
    program = record(lambda a, bias: a + bias, a=(8, 8), bias=(8,))
    assert found(program, {"a": "x?, -?", "bias": "x"})["result"] == "x, -"


def test_a_bias_is_followed_where_nothing_else_is_known():
    program = record(lambda a, bias: a + bias, a=(8, 8), bias=(8,))
    assert found(program, {"bias": "y"}) == {"a": "-, y", "bias": "y", "result": "-, y"}


def test_a_bias_is_decided_after_later_products():
    """The product says that the last dim of the sum is cut by x, and it is asked before the bias."""
    program = record(lambda a, bias, w: (a + bias) @ w, a=(8, 8), bias=(8, 1), w=(8, 8))
    assert found(program, {"bias": "x, -", "w": "x, -"})["add"] == "-, x"


def test_expand():
    program = record(lambda a: a.expand(8, 4), a=(1, 4))
    assert found(program, {"a": "-, y"})["result"] == "-, y"
    assert found(program, {"result": "x, y"})["a"] == "-, y"


def test_an_expanded_tensor_is_decided_after_products():
    program = record(lambda a, w: a.expand(8, 8) @ w, a=(8, 1), w=(8, 8))
    assert found(program, {"a": "x, -", "w": "x, -"})["expand"] == "-, x"


# The order of ops: by program order and size alone, each of the next three would be decided otherwise.


def test_ops_that_pass_everything_come_before_products():
    program = record(lambda a, b, w: torch.add(b @ w, a), a=(8, 8), b=(8, 64), w=(64, 8))
    assert found(program, {"a": "x, -", "w": "-, x"})["mm"] == "x, -"


def test_values_that_are_read_once_come_before_those_that_are_read_by_many():
    program = record(lambda a, b: ((p := a.exp()) + b.exp(), p + 1), a=(8, 8), b=(8, 8))
    assert found(program, {"a": "x, -", "b": "-, x"})["result"] == "-, x"


def test_factors_that_pass_come_before_sums():
    program = product((4, 32), (32, 8))
    assert found(program, {"b": "x, -", "result": "x, -"})["a"] == "x, -"


def test_a_closed_dim_stops_axes():
    program = record(lambda a: a.exp().exp(), a=(8, 8))
    layouts = found(program, {"a": "x, y", "exp": "-, -?"})
    assert layouts == {"a": "x, y", "exp": "-, y", "result": "-, y"}


@pytest.mark.parametrize("out", ["x, -", "x y, -"])
def test_a_closed_result_of_partial_sums(out):
    """E7: how it is reduced is the business of the op; the layouts of its operands stay."""
    program = product((8, 32), (32, 8))
    assert found(program, {"a": "x, y", "b": "y, -", "result": out}) == {"a": "x, y", "b": "y, -", "result": out}


def test_partial_axes_of_a_constraint_cut_no_dim():
    program = record(lambda a: a.exp(), a=(8, 8))
    layouts = run(program, {"a": "x, y", "result": "-?, -? + y"}).layouts
    assert str(layouts["result"]) == "x?, -? + y"


@pytest.mark.parametrize(
    ("left", "right", "out"),
    [
        ("x?, -?", "-?, x?@1", "x, -"),
        ("x?@1, -?", "-?, x?", "-, x"),
        ("x?@2, -?", "-?, x?@1", "-, x"),
        ("x?, -?@1", "-?, y?@1", "x, y"),
    ],
)
def test_the_first_priority_wins(left, right, out):
    program = record(lambda a, b: a + b, a=(8, 8), b=(8, 8))
    assert found(program, {"a": left, "b": right})["result"] == out


def test_batches_before_parameters():
    """E6: whatever their sizes, the result is cut by the batch, and the parameter keeps its own cut."""
    for batch in (4096, 4):
        program = product((batch, 512), (512, 512))
        layouts = found(program, {"a": "x?, -?", "b": "x?@1, -?@1"})
        assert layouts == {"a": "x, -", "b": "x, -", "result": "x, -"}


def test_axes_of_a_later_priority_are_kept_for_their_dim():
    program = record(lambda a, b: a + b, a=(8, 8), b=(8, 8))
    layouts = found(program, {"a": "x y, -", "b": "-?, y@1"})
    assert layouts["b"] == "x, y"


def test_a_later_priority_adds():
    program = record(lambda a, b: a + b, a=(8, 8), b=(8, 8))
    assert found(program, {"a": "x?, -?", "b": "x y?@1, -?@1"})["result"] == "x y, -"


def test_decisions_explain_a_layout():
    program = record(lambda a, w: (a @ w).relu(), a=(8, 8), w=(8, 8))
    why = run(program, {"w": "-, y"}).explain("result")
    assert [(d.value, d.dim, d.axes, d.source, d.factor) for d in why] == [
        ("mm", 1, ("y",), "w", "j"),
        ("result", 1, ("y",), "mm", "...0"),
    ]
    assert (
        str(why[0]) == "dim 1 of mm is cut by y as w is, along j of op 0, aten.mm.default (priority 0, level 3, basic)"
    )


def test_nothing_flows_through_an_op_without_a_rule():
    program = record(lambda a: torch.linalg.vector_norm(a, 3.5, 1).relu() * 2, a=(8, 8))
    op = program.ops[0]
    unknown = op._replace(call=op.call._replace(op="aten.no_such_op.default"))
    layouts = found(program._replace(ops=(unknown, *program.ops[1:])), {"a": "x, -"})
    assert layouts["result"] == "-"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"aa": "x, -"}, "has no such value; did you mean 'a'"),
        ({"a": "x"}, "has 1 dims, but its shape"),
    ],
)
def test_constraints_that_make_no_sense(asked, told):
    with pytest.raises(LayoutError, match=told):
        run(product((4, 4), (4, 4)), asked)


def test_a_constraint_on_another_mesh():
    with pytest.raises(LayoutError, match="is on"):
        run_hierarchical_propagation_pass(product((4, 4), (4, 4)), MESH, {"a": parse_constraint("dp, -", GRID)})


def test_an_unknown_eagerness():
    with pytest.raises(LayoutError, match="'greedy' is no eagerness"):
        run(product((4, 4), (4, 4)), {}, "greedy")
