"""Layouts of a matrix product whose operands lie nowhere yet: the grid of workers that moves the fewest elements.

A grid gives `rows`, `summed` and `columns` many workers to the three dims of a product [m, k] @ [k, n]. Every operand
starts with one copy: the first is gathered along the columns of the grid, the second along its rows, and the products
of workers that sum different parts are reduce-scattered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

from gt.core.errors import LayoutError
from gt.sharding.boxes import Shape
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec

AXES = ("rows", "summed", "columns")


class ProductGrid(NamedTuple):
    """The numbers of workers along the dims of a product."""

    rows: int
    summed: int
    columns: int

    def elements(self, m: int, k: int, n: int) -> int:
        """The elements that all workers together receive."""
        return (self.columns - 1) * m * k + (self.rows - 1) * k * n + (self.summed - 1) * m * n


class ProductLayout(NamedTuple):
    """The layouts of the operands and of the result of a product."""

    first: ShardingSpec
    second: ShardingSpec
    result: ShardingSpec


def best_grid(m: int, k: int, n: int, workers: int) -> ProductGrid:
    """The grid that moves the fewest elements; of equals the one that sums least. No dim is cut into more parts than it
    has elements, unless all grids do so."""
    sizes = (m, k, n)
    grids = list(_grids(workers))
    usable = [grid for grid in grids if all(map(int.__le__, grid, [max(size, 1) for size in sizes]))]
    return min(usable or grids, key=lambda grid: (grid.elements(m, k, n), grid.summed, grid))


def _grids(workers: int) -> Iterator[ProductGrid]:
    for rows in range(1, workers + 1):
        for summed in range(1, workers // rows + 1):
            if workers % (rows * summed) == 0:
                yield ProductGrid(rows, summed, workers // (rows * summed))


def lower_bound(m: int, k: int, n: int, workers: int) -> float:
    """The elements that some worker receives at least, if operands and result have one copy, spread evenly (Al Daas and
    others, 2022)."""
    large, middle, small = sorted((m, k, n), reverse=True)
    if workers <= large / middle:
        accessed = (large * middle + large * small) / workers + middle * small
    elif workers <= large * middle / small**2:
        accessed = 2 * math.sqrt(large * middle * small**2 / workers) + large * middle / workers
    else:
        accessed = 3 * (m * k * n / workers) ** (2 / 3)
    return accessed - (m * k + k * n + m * n) / workers


def lay_out_product(first: Shape, second: Shape, mesh: DeviceMesh) -> ProductLayout:
    """Layouts for `first @ second` on the workers of a mesh, which is seen as a grid. A batch dim that both operands
    have is cut by all workers if it has as many elements, since nothing moves then."""
    batch = _shared_batch(first, second, mesh.size)
    row = _row_dim(first, second)
    has_columns = len(second) > 1
    rank = max(len(first), len(second)) - (len(first) == 1) - (not has_columns)
    if batch:
        seen = DeviceMesh((mesh.size, 1, 1), AXES, mesh.workers, hosts=mesh.hosts)
        return ProductLayout(*[_spec(seen, size, {-batch: AXES}) for size in (len(first), len(second), rank)])
    m, n = first[row] if row else 1, second[-1] if has_columns else 1
    seen = DeviceMesh(best_grid(m, first[-1], n, mesh.size), AXES, mesh.workers, hosts=mesh.hosts)
    of_first = {row: ("rows",), -1: ("summed", "columns")}
    if has_columns:
        of_second: _Cut = {-2: ("summed", "rows"), -1: ("columns",)}
        of_result: _Cut = {row: ("rows",), -1: ("columns", "summed")}
    else:
        of_second, of_result = {-1: ("summed", "rows")}, {row + 1: ("rows", "summed")}
    return ProductLayout(
        _spec(seen, len(first), of_first), _spec(seen, len(second), of_second), _spec(seen, rank, of_result)
    )


def _shared_batch(first: Shape, second: Shape, workers: int) -> int:
    """The batch dim, counted from the end, that both operands have with at least as many elements as there are
    workers; 0 if there is none."""
    for dim in range(3, min(len(first), len(second)) + 1):
        if first[-dim] == second[-dim] >= workers:
            return dim
    return 0


def _row_dim(first: Shape, second: Shape) -> int:
    """The largest dim of the first operand that the second one has not, counted from the end; 0 for a vector."""
    own = [-dim for dim in range(2, len(first) + 1) if dim == 2 or _is_alone(second, dim)]
    return max(own, key=lambda dim: first[dim], default=0)


def _is_alone(second: Shape, from_end: int) -> bool:
    return from_end > len(second) or second[-from_end] == 1


_Cut: TypeAlias = dict[int, DimSpec]
"""The axes that cut dims, which are counted from the end."""


def _spec(mesh: DeviceMesh, rank: int, cut: _Cut) -> ShardingSpec:
    return ShardingSpec(mesh, [cut.get(dim - rank, ()) for dim in range(rank)])


class PhysicalTile(NamedTuple):
    """A tile of one worker."""

    worker: int
    tile: Shape


class VirtualGrid:
    """The tiles of all workers of a mesh, with `tiles` of them on each worker along each axis of the mesh. A mesh of
    one axis is a row of workers if `tiles` has two numbers.

    >>> grid = gt.distributed.VirtualGrid(gt.DeviceMesh((2, 4)), (8, 8))
    >>> grid.shape, grid.virtual_to_physical((9, 17))
    ((16, 32), PhysicalTile(worker=6, tile=(1, 1)))
    """

    def __init__(self, mesh: DeviceMesh, tiles: Sequence[int]) -> None:
        self.tiles = tuple(tiles)
        missing = len(self.tiles) - len(mesh.shape)
        if missing not in (0, 1) or min(self.tiles, default=1) < 1:
            raise LayoutError(
                f"mesh {mesh} needs a number of tiles for each of its {len(mesh.shape)} axes, not {tiles}"
            )
        self.mesh = mesh
        self._workers = (*[1] * missing, *mesh.shape)
        self.shape: Shape = tuple([count * size for count, size in zip(self._workers, self.tiles, strict=True)])

    def __contains__(self, virtual: Sequence[int]) -> bool:
        fits = [0 <= along < size for along, size in zip(virtual, self.shape, strict=False)]
        return len(virtual) == len(self.shape) and all(fits)

    def __iter__(self) -> Iterator[Shape]:
        """All virtual coordinates, row by row."""
        return product(*map(range, self.shape))

    def virtual_to_physical(self, virtual: Sequence[int]) -> PhysicalTile:
        if virtual not in self:
            raise LayoutError(f"{tuple(virtual)} is outside of a virtual grid of {self.shape}")
        pairs = [divmod(along, size) for along, size in zip(virtual, self.tiles, strict=True)]
        place = [worker for worker, _ in pairs][len(pairs) - len(self.mesh.shape) :]
        return PhysicalTile(self.mesh.at(place), tuple([tile for _, tile in pairs]))

    def physical_to_virtual(self, worker: int, tile: Sequence[int]) -> Shape:
        is_tile = len(tile) == len(self.tiles) and all(0 <= t < size for t, size in zip(tile, self.tiles, strict=True))
        if worker not in self.mesh or not is_tile:
            raise LayoutError(f"there is no tile {tuple(tile)} of worker {worker} in {self.tiles} tiles on {self.mesh}")
        place = (*[0] * (len(self.tiles) - len(self.mesh.shape)), *self.mesh.coordinate(worker))
        return tuple([at * size + along for at, size, along in zip(place, self.tiles, tile, strict=True)])
