"""Planned bytes of products in all layouts, against all chains of collectives along one axis; and the axes that they
use."""

import itertools
import random

import pytest

from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Input
from gt.sharding.op_calls import OpCall
from gt.sharding.program_builder import ProgramBuilder, Register
from gt.sharding.rules import entry_of
from gt.sharding.schedule_programs import choose_schedule, problem_of
from gt.sharding.schedules import schedule_cost
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec
from tests.distributed.collective_chains import fewest_bytes, spec_of_letters, states

OP = "aten.matmul.default"
GRID = DeviceMesh((2, 4), ("x", "y"))


def meta(*shape):
    return TensorMeta(shape, contiguous_strides(shape), 0, "float32")


def plan(sizes, left, right, out):
    """The bytes of a product, and the layout of its result."""
    m, k, n = sizes
    inputs = [Register(meta(m, k), left), Register(meta(k, n), right)]
    builder = ProgramBuilder(left.mesh, inputs)
    call = OpCall(OP, (Input(0), Input(1)), {}, (meta(m, k), meta(k, n)), (meta(m, n),))
    targets = [out.normal((m, n)) if out is not None else None]
    schedule = choose_schedule(builder, entry_of(OP).algorithms, call, (0, 1), targets)
    problem = problem_of(builder, call, (0, 1), targets)
    cost = schedule_cost(schedule, problem.operands, problem.result)
    return cost.bytes, str(problem.result.final_spec(schedule.result))


def check(shape, sizes, a, b, out):
    mesh = DeviceMesh(shape, ("x", "y", "z")[: len(shape)])
    specs = [spec_of_letters(tensor, letters, mesh) for tensor, letters in zip("abc", (a, b, out), strict=True)]
    nbytes, _ = plan(sizes, *specs)
    assert nbytes <= fewest_bytes(shape, a, b, out, sizes) + 1e-6, (a, b, out)


def layouts(axes, sample, seed):
    everything = list(itertools.product(*[states(tensor, axes) for tensor in "abc"]))
    return random.Random(seed).sample(everything, min(sample, len(everything)))


@pytest.mark.parametrize("sizes", [(64, 128, 32), (16, 16, 256), (256, 16, 16), (16, 512, 16), (64, 64, 64)])
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 2)])
def test_products_on_two_axes_move_no_more_than_any_chain_of_collectives(shape, sizes):
    for a, b, out in layouts(2, 150, seed=str((shape, sizes))):
        check(shape, sizes, a, b, out)


@pytest.mark.parametrize("sizes", [(64, 128, 32), (16, 16, 256)])
def test_products_on_three_axes_move_no_more_than_any_chain_of_collectives(sizes):
    for a, b, out in layouts(3, 40, seed=str(sizes)):
        check((2, 2, 2), sizes, a, b, out)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(64, 128, 32), (16, 16, 256), (64, 64, 64)])
def test_all_products_on_two_axes_move_no_more_than_any_chain_of_collectives(sizes):
    for a, b, out in layouts(2, 1 << 16, seed=""):
        check((2, 4), sizes, a, b, out)


@pytest.mark.parametrize(
    ("sizes", "left", "right", "out", "result", "nbytes"),
    [
        # results in another order of axes than the mesh: replicated operands are cut in that order
        ((64, 128, 32), "-, -", "-, -", "y x, -", "y x, -", 0),
        ((64, 128, 32), "-, -", "-, y", "-, y x", "-, y x", 0),
        # nothing has to move: the axis y, which cuts no operand, is left alone, and its workers do the same work
        ((64, 128, 32), "-, -", "-, -", None, "-, -", 0),
        ((64, 128, 32), "x, -", "-, -", None, "x, -", 0),
        # one operand has to move: workers along y take different columns of it, a quarter of the bytes each
        ((64, 128, 32), "x, -", "x, -", None, "x, y", 128 * 32 * 4),
        ((8, 4096, 8), "x, -", "-, x", None, "x, y", 4096 * 8 * 4),
        # the result is larger than what moves: the gather of its columns would cost more
        ((512, 16, 512), "x, -", "x, -", None, "x, -", 4 * 16 * 512 * 4),
    ],
)
def test_the_axes_that_products_use(sizes, left, right, out, result, nbytes):
    specs = [parse_spec(text, GRID) if text is not None else None for text in (left, right, out)]
    assert plan(sizes, *specs) == (nbytes, result)
