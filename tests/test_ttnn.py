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


@pytest.mark.parametrize(
    ("work", "kind", "said"),
    [
        (lambda x: ttnn.all_gather(x, dim=1), gt.LayoutError, "is not cut in dim 1"),
        (lambda x: ttnn.all_reduce(x), gt.LayoutError, "is not partial there"),
        (lambda x: ttnn.all_gather(x, dim=0, cluster_axis=2), gt.LayoutError, "cluster_axis=2 is no axis"),
        (lambda x: ttnn.linear(x, x.t(), activation="rely"), gt.LayoutError, "did you mean 'relu'?"),
        (lambda x: ttnn.soft_max(x), AttributeError, "gt.ttnn has no 'soft_max'; did you mean 'softmax'?"),
        (lambda x: ttnn.relu(x, memory_confg=None), TypeError, "memory_confg"),
    ],
)
def test_what_has_another_meaning_there_is_refused(work, kind, said):
    mesh_device = ttnn.open_mesh_device(ttnn.MeshShape([2, 4]))
    x = ttnn.from_torch(torch.ones(8, 4), device=mesh_device, mesh_mapper=ttnn.ShardTensorToMesh(mesh_device, 0))
    with pytest.raises(kind, match=said.replace("?", r"\?")):
        work(x)
