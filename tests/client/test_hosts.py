"""Workers that plans take to be on several machines: default layouts, and the values computed with them."""

import pytest
import torch

import gt


@pytest.fixture
def two_hosts():
    """Four workers that have joined in alternating order."""
    gt.shutdown()
    gt.init(workers=4, mode="virtual", hosts=["a", "b", "a", "b"])
    yield
    gt.shutdown()


def test_every_mesh_without_named_workers_keeps_hosts_together(two_hosts, no_signals, tmp_path):
    mesh = gt.mesh((2, 2), ("dp", "tp"))
    assert mesh.workers == (0, 2, 1, 3) and not mesh.crosses_hosts("tp")
    with gt.open_mesh((2, 2), ("dp", "tp")) as opened:
        assert opened is mesh
    assert gt.randn(8, 4).spec.mesh.workers == (0, 2, 1, 3)
    path = tmp_path / "signals.yaml"
    path.write_text(
        "grid:\n  shard: {mesh: {dp: 2, tp: 2}, dims: [dp, tp]}\nrow:\n  shard: {axis: 0}\n"
        "model:\n  mesh: {dp: 2, tp: 2}\n  weight: [tp, '-']\n"
    )
    gt.load_config(path)
    with gt.signal.context("grid"):
        assert gt.ones(4, 4).spec.mesh is mesh
    with gt.signal.context("row"):
        assert gt.ones(4, 4).spec.mesh.workers == (0, 2, 1, 3)
    assert gt.to(torch.nn.Linear(4, 4)).weight.spec.mesh is mesh


def test_named_workers_are_taken_as_they_are(two_hosts):
    mesh = gt.mesh((2, 2), ("dp", "tp"), workers=[0, 1, 2, 3])
    assert mesh.workers == (0, 1, 2, 3) and mesh.crosses_hosts("tp")
    assert gt.mesh(2, workers=[3, 0]).workers == (3, 0)


def test_a_tensor_has_the_mesh_that_it_was_given(two_hosts):
    mesh = gt.mesh((2, 2), ("dp", "tp"))
    value = torch.randn(6, 10)
    x = gt.distribute(value, mesh, "dp, tp")
    assert x.spec.mesh is mesh
    assert torch.equal(x.cpu(), value)
    torch.testing.assert_close((x @ x.t()).cpu(), value @ value.t())


def test_workers_are_listed_with_their_hosts(two_hosts):
    assert [each.host for each in gt.workers()] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"workers": 2, "mode": "virtual", "hosts": ["a"]}, "names 1 machines for 2 workers"),
        ({"workers": 2, "mode": "virtual", "hosts": "ab"}, "the name of a machine for each worker"),
        ({"workers": 2, "hosts": ["a", "b"]}, "The machines of real workers are known"),
    ],
)
def test_hosts_that_cannot_be_are_refused(arguments, reason):
    gt.shutdown()
    with pytest.raises(gt.SettingsError, match=reason):
        gt.init(**arguments)
