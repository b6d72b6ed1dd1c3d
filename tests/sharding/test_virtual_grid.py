"""Virtual coordinates of tiles on workers, and back."""

import pytest

from gt.core.errors import LayoutError
from gt.distributed.product_grids import VirtualGrid
from gt.sharding.spec import DeviceMesh


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 4), (4, 4), (3, 5), (1, 200), (7,), (2, 3, 2)])
@pytest.mark.parametrize("side", [1, 3])
def test_virtual_coordinates_and_back(shape, side):
    mesh = DeviceMesh(shape)
    grid = VirtualGrid(mesh, [side] * len(shape))
    assert grid.shape == tuple(size * side for size in shape)
    found = set()
    for virtual in grid:
        worker, tile = grid.virtual_to_physical(virtual)
        assert grid.physical_to_virtual(worker, tile) == virtual and virtual in grid
        found.add((worker, tile))
    assert len(found) == mesh.size * side ** len(shape)


def test_a_mesh_of_workers_with_tiles_is_one_grid():
    grid = VirtualGrid(DeviceMesh((2, 4)), (8, 8))
    assert grid.shape == (16, 32)
    assert grid.virtual_to_physical((9, 17)) == (6, (1, 1))
    row = VirtualGrid(DeviceMesh((4,)), (8, 8))
    assert row.shape == (8, 32) and row.virtual_to_physical((3, 9)) == (1, (3, 1))
    with pytest.raises(LayoutError, match=r"\(16, 0\) is outside"):
        grid.virtual_to_physical((16, 0))
    with pytest.raises(LayoutError, match="no tile"):
        grid.physical_to_virtual(0, (8, 0))
    with pytest.raises(LayoutError, match="number of tiles"):
        VirtualGrid(DeviceMesh((2, 4)), (8,))
