"""Virtual coordinates: one grid of tiles over all workers of a mesh.

Each worker has a grid of tiles, and those of neighbours lie side by side: a mesh of 2x4 workers with 8x8 tiles each is
a grid of 16x32. A tile has a virtual coordinate in the whole grid, and a physical one: its worker, and its coordinate
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from gt.core.errors import LayoutError
from gt.sharding.boxes import Shape
from gt.sharding.spec import DeviceMesh


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
