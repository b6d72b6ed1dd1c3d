"""Programs of TT-NN run with its import line changed."""

import pytest
import torch
from torch.nn import functional

import gt
from gt import ttnn


@pytest.fixture(autouse=True)
def eight_workers():
    gt.init(workers=8, mode="virtual")
    yield
    gt.shutdown()


def test_a_tensor_parallel_block():
    mesh_device = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    x, w, v = torch.randn(1, 1, 64, 128), torch.randn(1, 1, 128, 256), torch.randn(1, 1, 256, 64)
    rows = ttnn.ShardTensor2dMesh(mesh_device, mesh_shape=(2, 4), dims=(2, None))
    a = ttnn.from_torch(x, dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, device=mesh_device, mesh_mapper=rows)
    b, c = [
        ttnn.from_torch(
            value,
            layout=ttnn.TILE_LAYOUT,
            device=mesh_device,
            mesh_mapper=ttnn.ShardTensor2dMesh(mesh_device, (2, 4), dims),
        )
        for value, dims in ((w, (None, 3)), (v, (None, 2)))
    ]
    hidden = ttnn.linear(a, b, activation="gelu", memory_config=ttnn.DRAM_MEMORY_CONFIG)
    assert str(hidden.spec) == "-, -, rows, columns"
    partial = ttnn.matmul(hidden, c)
    assert partial.spec.partial == ("columns",)
    scattered = ttnn.reduce_scatter(partial, dim=3, cluster_axis=1, num_links=1)
    gathered = ttnn.all_gather(scattered, dim=3, cluster_axis=1, topology=None)
    expected = functional.gelu(x @ w) @ v
    composer = ttnn.ConcatMesh2dToTensor(mesh_device, mesh_shape=(2, 4), dims=(2, 3))
    torch.testing.assert_close(ttnn.to_torch(scattered, mesh_composer=composer), expected, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(ttnn.to_torch(ttnn.all_reduce(partial)), expected, atol=1e-3, rtol=1e-4)
    assert gathered.spec.dims[3] == ()
    assert [tuple(part.shape) for part in ttnn.get_device_tensors(scattered)] == [(1, 1, 32, 16)] * 8
    ttnn.close_mesh_device(mesh_device)


def test_data_parallel_in_one_row():
    mesh_device = ttnn.open_mesh_device()
    x, w = torch.randn(16, 4), torch.randn(4, 4)
    a = ttnn.from_torch(x, device=mesh_device, mesh_mapper=ttnn.ShardTensorToMesh(mesh_device, dim=0))
    b = ttnn.from_torch(w, device=mesh_device, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh_device))
    c = ttnn.add(ttnn.mul(ttnn.relu(ttnn.matmul(a, b, transpose_b=True)), 2.0), ttnn.ones((1, 4), device=mesh_device))
    joined = ttnn.to_torch(c, mesh_composer=ttnn.ConcatMeshToTensor(mesh_device, dim=0))
    torch.testing.assert_close(joined, (x @ w.T).relu() * 2 + 1)
    normed = ttnn.layer_norm(c, epsilon=1e-5, weight=ttnn.ones((1, 4)), bias=ttnn.zeros((1, 4)))
    torch.testing.assert_close(ttnn.to_torch(normed), functional.layer_norm(joined, (4,)), atol=1e-5, rtol=1e-5)
    assert ttnn.softmax(c, dim=-1, dtype=ttnn.bfloat16).dtype == torch.bfloat16


def test_placements_and_a_move_to_the_mesh_in_two_steps():
    mesh_device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    value = torch.cat([torch.full((1, 1, 32, 32), number) for number in (1.0, 2.0)], dim=3)
    config = ttnn.MeshMapperConfig(placements=[ttnn.PlacementReplicate(), ttnn.PlacementShard(3)])
    mapper = ttnn.create_mesh_mapper(mesh_device, config)
    x = ttnn.from_torch(value, ttnn.float32, mesh_mapper=mapper, layout=ttnn.Layout.TILE)
    x = ttnn.to_device(x, mesh_device, memory_config=ttnn.L1_MEMORY_CONFIG)
    assert [part.unique().tolist() for part in ttnn.get_device_tensors(x)] == [[1], [2]], "it lies as the mapper said"
    composer = ttnn.create_mesh_composer(mesh_device, ttnn.MeshComposerConfig([2, 3]))
    gathered = ttnn.all_gather(x, dim=3, num_links=1, topology=ttnn.Topology.Ring)
    assert torch.equal(ttnn.to_torch(x, mesh_composer=composer), value)
    assert torch.equal(ttnn.get_device_tensors(gathered)[1], value)
    ttnn.visualize_tensor(x)
    ttnn.close_device(mesh_device)


def test_a_default_mapper_and_a_part_of_the_workers():
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 2), physical_device_ids=[4, 5, 6, 7]) as mesh_device:
        with ttnn.distribute(ttnn.ShardTensorToMesh(mesh_device, dim=0)):
            x = ttnn.from_torch(torch.arange(8), layout=ttnn.TILE_LAYOUT, device=mesh_device)
            y = ttnn.as_tensor(torch.arange(8), cache_file_name=None)
        with ttnn.distribute(ttnn.ConcatMeshToTensor(mesh_device, dim=0)):
            assert ttnn.to_torch(x + y).tolist() == [2 * number for number in range(8)]
    assert x.spec is y.spec and x.spec.mesh.workers == (4, 5, 6, 7)
    assert ttnn.open_device(3).workers == (3,) and ttnn.get_num_devices() == 8


@pytest.mark.parametrize(
    ("work", "kind", "said"),
    [
        (lambda x: ttnn.all_gather(x, dim=1), gt.LayoutError, "is not cut in dim 1"),
        (lambda x: ttnn.all_reduce(x), gt.LayoutError, "is not partial there"),
        (lambda x: ttnn.all_gather(x, dim=0, cluster_axis=2), gt.LayoutError, "cluster_axis=2 is no axis"),
        (lambda x: ttnn.linear(x, x.t(), activation="rely"), gt.LayoutError, "did you mean 'relu'?"),
        (lambda x: ttnn.open_mesh_device((1, 2), offset=(0, 1)), gt.LayoutError, "physical_device_ids="),
        (lambda x: ttnn.soft_max(x), AttributeError, "gt.ttnn has no 'soft_max'; did you mean 'softmax'?"),
        (lambda x: ttnn.relu(x, memory_confg=None), TypeError, "memory_confg"),
    ],
)
def test_what_has_another_meaning_there_is_refused(work, kind, said):
    mesh_device = ttnn.open_mesh_device(ttnn.MeshShape([2, 4]))
    x = ttnn.from_torch(torch.ones(8, 4), device=mesh_device, mesh_mapper=ttnn.ShardTensorToMesh(mesh_device, 0))
    with pytest.raises(kind, match=said.replace("?", r"\?")):
        work(x)
