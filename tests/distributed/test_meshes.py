"""Open meshes, views of meshes, and the topologies of tensors."""

import threading

import pytest
import torch

import gt
from gt.core.errors import LayoutError
from gt.sharding.spec import DeviceMesh

GRID = DeviceMesh((2, 4), ("dp", "tp"), (7, 6, 5, 4, 3, 2, 1, 0))


@pytest.mark.parametrize(
    ("worker", "axis", "offset", "neighbor"),
    [(7, "tp", 1, 6), (4, "tp", 1, 7), (7, "tp", -1, 4), (7, "dp", 1, 3), (3, "dp", 1, 7), (6, "tp", 5, 5)],
)
def test_neighbours_along_rings(worker, axis, offset, neighbor):
    assert GRID.neighbor(worker, axis, offset) == neighbor
    assert GRID.neighbor(neighbor, axis, -offset) == worker


def test_a_reshaped_mesh_has_the_same_workers_in_the_same_order():
    seen = GRID.reshape((4, 2), ("rows", "columns"))
    assert seen.workers == GRID.workers and seen.shape == (4, 2)
    assert seen.reshape((2, 4), ("dp", "tp")) is GRID
    assert GRID.coordinates()[5] == (0, 2) and GRID.submesh(dp=1).workers == (3, 2, 1, 0)
    with pytest.raises(LayoutError, match=r"has 8 workers, and \(3, 2\) needs 6"):
        GRID.reshape((3, 2))
    with pytest.raises(LayoutError, match="has no axis 'pp'"):
        GRID.neighbor(7, "pp")
    with pytest.raises(LayoutError, match="worker 9 is not in mesh"):
        GRID.neighbor(9, "dp")


@pytest.mark.usefixtures("eight_workers")
def test_layouts_without_a_mesh_are_on_the_open_one():
    value = torch.arange(16.0).reshape(4, 4)
    with gt.open_mesh((2, 4), ("dp", "tp")) as mesh:
        x = gt.distribute(value, placements="dp, tp")
        made = gt.ones(4, 4, placements=[gt.Shard(0), gt.Replicate()])
        with gt.open_mesh(mesh.submesh(dp=1)) as inner:
            assert gt.shard(value).spec.mesh is inner and gt.replicate(value).spec.mesh is inner
        assert gt.shard(value).spec.mesh is mesh
        assert gt.ones(2).spec.mesh is not mesh, "tensors without a layout are placed as ever"
        on_own_mesh = gt.distribute(value, gt.mesh(2, ("x",)), "x, -").redistribute(placements="-, x")
    assert x.spec.mesh is mesh and str(x.spec) == "dp, tp" and str(made.spec) == "dp, -"
    assert str(on_own_mesh.spec) == "-, x", "a tensor stays on its mesh"
    assert torch.equal(x.cpu(), value)


@pytest.mark.usefixtures("eight_workers")
def test_a_mesh_is_open_in_its_block_and_thread_only():
    with gt.open_mesh(2, ("x",)):
        errors = []

        def elsewhere():
            with pytest.raises(LayoutError, match="needs mesh="):
                gt.ones(2, placements="x")
            errors.append("raised")

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(60)
        assert errors == ["raised"]
    with pytest.raises(LayoutError, match=r"none is open.*gt\.open_mesh"):
        gt.shard(torch.ones(2))
    with pytest.raises(LayoutError, match=r"needs mesh=.*gt\.open_mesh"):
        gt.ones(2, placements="x")
    with pytest.raises(LayoutError, match="needs 99 workers"), gt.open_mesh(99):
        pass


@pytest.mark.usefixtures("eight_workers")
def test_the_topology_of_a_tensor():
    mesh = gt.mesh((2, 2), ("dp", "tp"), (3, 2, 1, 0))
    topology = gt.distribute(torch.ones(4, 4), mesh, "dp, - + tp").topology
    assert topology.mesh is mesh and topology.placements == (gt.Shard(0), gt.Partial())
    assert topology.coordinates == {3: (0, 0), 2: (0, 1), 1: (1, 0), 0: (1, 1)}


def test_explain_tells_the_bytes_between_hosts():
    gt.shutdown()
    gt.init(workers=4, mode="virtual", hosts=["a", "b", "a", "b"])
    mesh = gt.mesh((2, 2), ("dp", "tp"))
    x = gt.distribute(torch.ones(8, 8), mesh, "dp, tp")
    within = gt.distributed.explain(x, gt.distribute(torch.ones(8, 8), mesh, "tp, -"), out="dp, tp")
    between = gt.distributed.explain(x, gt.distribute(torch.ones(8, 8), mesh, "tp, -"), out="-, tp")
    assert within.host_bytes == 0 < within.bytes
    assert 0 < between.host_bytes <= between.bytes
    assert f"{between.host_bytes:,} of them between hosts" in str(between)
    gt.shutdown()
