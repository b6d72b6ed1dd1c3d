"""Mappers and composers, tensors from parts, and torch's DTensor."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import tensor as dtensor

import gt
from gt.core.errors import LayoutError
from gt.distributed import (
    ConcatMesh2dToTensor,
    ConcatMeshToTensor,
    ReplicateTensorToMesh,
    ShardTensor2dMesh,
    ShardTensorToMesh,
)

VALUE = torch.arange(48.0).reshape(6, 8)
pytestmark = pytest.mark.usefixtures("eight_workers")


def grid():
    return gt.mesh((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("mapper", "layout"),
    [
        (lambda: ReplicateTensorToMesh(grid()), "-, -"),
        (lambda: ShardTensorToMesh(grid(), 1), "-, dp tp"),
        (lambda: ShardTensor2dMesh(grid(), (0, 1), (2, 4)), "dp, tp"),
        (lambda: ShardTensor2dMesh(grid(), dims=(None, 0), mesh_shape=(2, 4)), "tp, -"),
        (lambda: ShardTensor2dMesh(grid(), dims=(1, None), mesh_shape=(4, 2)), "-, rows"),
        (lambda: ShardTensor2dMesh(gt.mesh(8, ("x",)), dims=(0, 1), mesh_shape=(4, 2)), "rows, columns"),
        (lambda: ShardTensor2dMesh(grid(), (0, 1), (2, 2), (0, 2)), "dp, tp"),
        (lambda: ShardTensorToMesh(grid(), 1, mesh_shape=(1, 4), mesh_offset=(1, 0)), "-, dp tp"),
        (lambda: ReplicateTensorToMesh(grid(), mesh_shape=(2, 1)), "-, -"),
    ],
)
def test_mappers(mapper, layout):
    x = gt.from_torch(VALUE, mesh=grid(), mesh_mapper=mapper())
    assert str(x.spec) == layout and torch.equal(gt.to_torch(x), VALUE)


@pytest.mark.parametrize(
    ("layout", "composer", "expected"),
    [
        ("-, dp tp", lambda: ConcatMeshToTensor(grid(), 1), VALUE),
        ("dp, tp", lambda: ConcatMesh2dToTensor(grid(), (0, 1), (2, 4)), VALUE),
        ("tp, dp", lambda: ConcatMesh2dToTensor(grid(), dims=(1, 0), mesh_shape=(2, 4)), VALUE),
        ("-, -", lambda: ConcatMeshToTensor(grid(), 0), VALUE.repeat(8, 1)),
        ("dp, -", lambda: ConcatMesh2dToTensor(grid(), (0, 1)), VALUE.repeat(1, 4)),
    ],
)
def test_composers_join_what_the_workers_hold(layout, composer, expected):
    x = gt.from_torch(VALUE, mesh=grid(), placements=layout)
    assert torch.equal(gt.to_torch(x, mesh_composer=composer()), expected)


def test_mappers_and_composers_of_a_part_of_a_mesh():
    part = {"mesh_shape": (2, 2), "mesh_offset": (0, 2)}
    x = gt.from_torch(VALUE, mesh=grid(), mesh_mapper=ShardTensor2dMesh(grid(), dims=(0, 1), **part))
    assert x.spec.mesh.workers == (2, 3, 6, 7) and x.spec.mesh is grid().submesh((2, 2), (0, 2))
    for composer in (ConcatMesh2dToTensor(grid(), dims=(0, 1), **part), None):
        assert torch.equal(gt.to_torch(x, mesh_composer=composer), VALUE)
    y = gt.from_torch(VALUE, mesh_mapper=ShardTensorToMesh(grid(), 0, **part))
    assert torch.equal(gt.to_torch(y, mesh_composer=ConcatMeshToTensor(grid(), 0, **part)), VALUE)
    with pytest.raises(LayoutError, match=r"no part of shape \(2, 2\) at offset \(0, 3\)"):
        ShardTensorToMesh(grid(), 0, (2, 2), (0, 3))


def test_default_mappers_and_composers():
    mapper, composer = ShardTensorToMesh(grid(), 0), ConcatMeshToTensor(grid(), 1)
    with gt.distributed.default_mapper(mapper), gt.distributed.default_mapper(composer):
        x = gt.from_torch(VALUE, mesh=grid())
        assert x.spec is gt.from_torch(VALUE, mesh_mapper=mapper).spec
        assert gt.to_torch(gt.replicate(VALUE, grid())).shape == (len(VALUE), 8 * VALUE.shape[1])
        assert gt.from_torch(VALUE, mesh=grid(), placements="-, -").spec.is_whole, "what is said counts"
        with gt.distributed.default_mapper(ReplicateTensorToMesh(grid())):
            assert gt.from_torch(VALUE).spec.is_whole
        assert gt.from_torch(VALUE).spec is x.spec
    assert gt.from_torch(VALUE, mesh=grid()).spec.is_whole and torch.equal(gt.to_torch(x), VALUE)
    with pytest.raises(LayoutError, match="is no mapper or composer"), gt.distributed.default_mapper(grid()):
        pass


def test_dtypes_and_mistakes_of_mappers():
    x = gt.from_torch(VALUE, "int32", mesh_mapper=ShardTensorToMesh(grid(), 0))
    assert x.dtype == torch.int32 and gt.to_torch(x, torch.float64).dtype == torch.float64
    with pytest.raises(LayoutError, match="both say how"):
        gt.from_torch(VALUE, mesh_mapper=ShardTensorToMesh(grid(), 0), placements="dp, -")
    with pytest.raises(LayoutError, match="is no part of mesh="):
        gt.from_torch(VALUE, mesh=gt.mesh(2), mesh_mapper=ShardTensorToMesh(grid(), 0))
    with pytest.raises(LayoutError, match=r"dims=\(1, -1\) name one dim of parts of 2 dims"):
        gt.to_torch(gt.distribute(VALUE, grid(), "-, -"), mesh_composer=ConcatMesh2dToTensor(grid(), (1, -1)))
    with pytest.raises(LayoutError, match="two different dims"):
        ConcatMesh2dToTensor(grid(), (0, 0))
    with pytest.raises(LayoutError, match="is partial"):
        gt.to_torch(gt.distribute(VALUE, grid(), "-, - + dp tp"), mesh_composer=ConcatMeshToTensor(grid(), 0))
    with pytest.raises(LayoutError, match="the composer is of mesh"):
        gt.to_torch(gt.from_torch(VALUE, mesh=gt.mesh(2)), mesh_composer=ConcatMeshToTensor(grid(), 0))
    with pytest.raises(LayoutError, match="is no mapper"):
        gt.from_torch(VALUE, mesh_mapper=grid())
    with pytest.raises(LayoutError, match="is no composer"):
        gt.to_torch(x, mesh_composer=grid())
    with pytest.raises(LayoutError, match="dim=7 names a dim that parts of 2 dims do not have"):
        gt.to_torch(x, mesh_composer=ConcatMeshToTensor(grid(), 7))
    with pytest.raises(LayoutError, match="dims=0: say one for the rows"):
        ShardTensor2dMesh(grid(), 0)


@pytest.mark.parametrize("layout", ["dp, tp", "dp tp, -", "-, -", "tp, -"])
def test_a_tensor_from_the_parts_of_workers(layout):
    parts = {w: VALUE[part.slice] for w, part in gt.distribute(VALUE, grid(), layout).shards().items()}
    by_worker, in_order = gt.from_shards(parts, grid(), layout), gt.from_shards([*parts.values()], grid(), layout)
    for x in (by_worker, in_order):
        assert str(x.spec) == layout and torch.equal(x.cpu(), VALUE)


@pytest.mark.parametrize("layout", ["dp, tp", "tp, -", "-, -"])
def test_columns_that_are_contiguous_in_the_parts_are_so_in_the_whole(layout):
    value = VALUE.t().contiguous().t()
    parts = [value[part.slice] for part in gt.distribute(value, grid(), layout).shards().values()]
    x = gt.from_shards(parts, grid(), layout)
    assert torch.equal(x.cpu(), value) and x.stride() == value.stride()


def test_parts_along_a_partial_axis_are_addends():
    x = gt.from_shards([torch.full((2,), float(n)) for n in range(8)], grid(), "dp + tp")
    assert str(x.spec) == "dp + tp" and x.cpu().tolist() == [6, 6, 22, 22]
    most = gt.from_shards([torch.full((2,), float(n)) for n in range(8)], grid(), [gt.Partial("max")] * 2)
    assert most.cpu().tolist() == [7, 7]


def test_parts_that_do_not_fit():
    with pytest.raises(LayoutError, match="3 parts do not fit mesh"):
        gt.from_shards([VALUE] * 3, grid())
    with pytest.raises(LayoutError, match="worker 7 holds other values"):
        gt.from_shards([VALUE] * 7 + [VALUE + 1], grid())
    with pytest.raises(LayoutError, match="its shard of"):
        gt.from_shards([torch.ones(3), torch.ones(1)], gt.mesh(2, ("x",)), "x")
    with pytest.raises(LayoutError, match=r"worker 1 holds torch.float32, and worker 0 torch.int64"):
        gt.from_shards([torch.ones(1, dtype=torch.int64), torch.full((1,), 0.5)], gt.mesh(2, ("x",)), "x")
    with pytest.raises(LayoutError, match="the part of worker 0 is no tensor, but of type int"):
        gt.from_shards([1, 2], gt.mesh(2, ("x",)), "x")


def test_equal_parts_may_have_no_numbers():
    part = torch.tensor([1, float("nan"), float("inf")])
    x = gt.from_shards([part, part.clone()], gt.mesh(2, ("x",)), "-")
    torch.testing.assert_close(x.cpu(), part, equal_nan=True)


@pytest.mark.parametrize(
    ("theirs", "layout"),
    [
        ([dtensor.Shard(0), dtensor.Replicate()], "dp, -"),
        ([dtensor.Partial(), dtensor.Shard(1)], "-, tp + dp"),
        ([dtensor.Partial("max"), dtensor.Replicate()], "-, - + dp:max"),
        ([dtensor.Partial("product"), gt.Shard(0)], "tp, - + dp:prod"),
    ],
)
def test_torchs_placements_are_taken_like_ours(theirs, layout):
    x = gt.distribute(VALUE, grid(), theirs)
    assert str(x.spec) == layout and str(x.redistribute(placements=theirs).spec) == layout
    assert torch.equal(x.cpu(), VALUE)


def test_torchs_placements_that_gt_lacks():
    with pytest.raises(LayoutError, match="no placement like torch's"):
        gt.distribute(VALUE, grid(), [dtensor.Partial("avg"), dtensor.Replicate()])


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_to_dtensor_and_back(one_rank):
    x = gt.distribute(VALUE, grid(), "dp, - + tp")
    theirs = gt.to_dtensor(x, one_rank)
    assert theirs.placements == (dtensor.Shard(0), dtensor.Replicate())
    assert torch.equal(theirs.full_tensor(), VALUE)
    ours = gt.from_dtensor(theirs)
    assert (ours.spec.mesh.shape, ours.spec.mesh.axis_names, str(ours.spec)) == ((1, 1), ("dp", "tp"), "dp, -")
    assert torch.equal(ours.cpu(), VALUE)
    with pytest.raises(LayoutError, match=r"mesh of shape \(1, 1\)"):
        gt.from_dtensor(theirs, grid())
