"""Grids for products whose layouts are free: few more bytes than any algorithm needs."""

import itertools

import pytest
import torch

from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Input
from gt.distributed.product_grids import ProductGrid, best_grid, lay_out_product, lower_bound
from gt.sharding.op_calls import OpCall
from gt.sharding.program_builder import ProgramBuilder, Register
from gt.sharding.rules import entry_of
from gt.sharding.schedule_programs import choose_schedule, problem_of
from gt.sharding.schedules import schedule_cost
from gt.sharding.spec import DeviceMesh, compute_local_shape

SIZES = (256, 1024, 4096, 65536)
COUNTS = (1, 2, 4, 8, 16, 32, 64)


def planned_elements(first, second, workers):
    """The elements that the plan of a product moves, in the layouts for it."""
    layout = lay_out_product(first, second, DeviceMesh((workers,), ("x",)))
    shape = tuple(torch.matmul(torch.empty(first, device="meta"), torch.empty(second, device="meta")).shape)
    metas = [TensorMeta(each, contiguous_strides(each), 0, "float32") for each in (first, second, shape)]
    builder = ProgramBuilder(layout.first.mesh, [Register(metas[0], layout.first), Register(metas[1], layout.second)])
    call = OpCall("aten.matmul.default", (Input(0), Input(1)), {}, tuple(metas[:2]), (metas[2],))
    algorithms = entry_of(call.op).algorithms
    schedule = choose_schedule(builder, algorithms, call, (0, 1), [layout.result])
    problem = problem_of(builder, call, (0, 1), [layout.result])
    return schedule_cost(schedule, problem.operands, problem.result).bytes / 4


@pytest.mark.parametrize("workers", COUNTS)
def test_the_best_grid_is_within_thirty_percent_of_the_lower_bound(workers):
    for m, k, n in itertools.product(SIZES, repeat=3):
        moved, least = best_grid(m, k, n, workers).elements(m, k, n) / workers, lower_bound(m, k, n, workers)
        assert least - 1e-6 <= moved <= 1.3 * least + 1e-6, (m, k, n)


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1024, 1024, 1024), (65536, 256, 1024), (256, 65536, 256), (256, 4096, 65536)]
)
def test_plans_in_these_layouts_are_within_thirty_percent_of_the_lower_bound(m, k, n, workers):
    moved, least = planned_elements((m, k), (k, n), workers) / workers, lower_bound(m, k, n, workers)
    assert least - 1e-6 <= moved <= 1.3 * least + 1e-6


@pytest.mark.parametrize(
    ("sizes", "workers", "grid"),
    [
        ((1024, 1024, 1024), 8, (2, 2, 2)),
        ((65536, 256, 256), 8, (8, 1, 1)),
        ((256, 65536, 256), 8, (1, 8, 1)),
        ((256, 256, 65536), 8, (1, 1, 8)),
        ((4096, 256, 4096), 16, (4, 1, 4)),
        ((64, 64, 64), 7, (1, 1, 7)),
        ((1, 8, 8), 4, (1, 2, 2)),
        ((2, 2, 2), 64, (4, 4, 4)),
        ((0, 4, 4), 4, (1, 1, 4)),
    ],
)
def test_best_grids(sizes, workers, grid):
    assert best_grid(*sizes, workers) == ProductGrid(*grid)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((64, 32), (32, 16)),
        ((32,), (32,)),
        ((32,), (32, 16)),
        ((64, 32), (32,)),
        ((8, 64, 32), (32, 16)),
        ((8, 64, 32), (8, 32, 16)),
        ((2, 64, 32), (2, 32, 16)),
        ((4, 1, 64, 32), (1, 1, 32, 128)),
        ((32,), (8, 32, 16)),
        ((8, 64, 32), (32,)),
    ],
)
@pytest.mark.parametrize("workers", [1, 2, 7, 8])
def test_each_element_of_operands_of_any_rank_is_on_one_worker(first, second, workers):
    layout = lay_out_product(first, second, DeviceMesh((workers,), ("x",)))
    shape = tuple(torch.matmul(torch.empty(first), torch.empty(second)).shape)
    for spec, size in zip(layout, (first, second, shape), strict=True):
        assert len(spec.dims) == len(size) and not spec.partial
    parts = [sum(torch.Size(compute_local_shape(layout.first, first, w)).numel() for w in range(workers))]
    assert parts[0] == torch.Size(first).numel() or 1 in (len(first), len(second))
