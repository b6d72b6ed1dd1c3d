"""cat, stack, split and unbind, shard by shard."""

import pytest
import torch

from gt.sharding.rules import rule_of
from gt.sharding.spec import DeviceMesh
from gt.sharding.strategies import FactorSharding, build_strategy
from tests.sharding.samples import numbers
from tests.sharding.simulate import OpCall, check, encode, meta_of


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat(dim):
    shapes = [(5, 2), (1, 2), (0, 2), (3, 2)] if dim == 0 else [(2, 5), (2, 1), (2, 0), (2, 3)]
    check("aten.cat.default", [numbers(*shape) for shape in shapes], dim)


def test_cat_of_one_of_none_and_of_other_dtypes():
    check("aten.cat.default", [numbers(5, 2)])
    check("aten.cat.default", [torch.zeros(0), numbers(3, 2), torch.zeros(0)], 1)
    check("aten.cat.default", [torch.arange(3), numbers(4)])
    check("aten.cat.default", [torch.rand(3) > 0.5, torch.rand(4) > 0.5])


def test_cat_asks_each_operand_for_what_a_part_of_the_result_needs():
    a, b, joined = torch.zeros(4), torch.zeros(6), torch.zeros(10)
    call = OpCall("aten.cat.default", (encode([a, b], []),), {}, (meta_of(a), meta_of(b)), (meta_of(joined),))
    mesh = DeviceMesh((2,), ("x",))
    strategy = build_strategy(rule_of(call), call.shapes, call.result_shapes, mesh, {"d0": FactorSharding(("x",))})
    assert [str(spec) for spec in strategy.operands] == ["x[0:4 4:4]", "x[0:1 1:6]"]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_stack(dim, count):
    check("aten.stack.default", [numbers(3, 5) for _ in range(count)], dim)


def test_stack_of_other_dtypes():
    check("aten.stack.default", [torch.arange(3), numbers(3)])
    check("aten.stack.default", [torch.rand(3) > 0.5, torch.rand(3) > 0.5], 1)


def test_block_diag():
    check("aten.block_diag.default", [numbers(2, 3), numbers(1, 1), numbers(3, 0), numbers(2, 2)])


@pytest.mark.parametrize("op", ["split", "split_copy", "unsafe_split"])
def test_split(op):
    check(f"aten.{op}.Tensor", numbers(7, 2), 3)
    check(f"aten.{op}.Tensor", numbers(2, 5), 1, -1)
    check(f"aten.{op}.Tensor", numbers(0, 2), 1)


@pytest.mark.parametrize("op", ["split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes"])
def test_split_with_sizes(op):
    check(f"aten.{op}.default", numbers(7, 2), [2, 0, 4, 1])
    check(f"aten.{op}.default", numbers(2, 3) > 0, [3], 1)


@pytest.mark.parametrize("op", ["unbind", "unbind_copy"])
def test_unbind(op):
    check(f"aten.{op}.int", numbers(5, 2))
    check(f"aten.{op}.int", numbers(3, 2) > 0, -1)
