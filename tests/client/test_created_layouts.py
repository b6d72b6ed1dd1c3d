"""Tensors that are created with a layout."""

import pytest
import torch

import gt
from tests.client.layout_cases import EVERYWHERE, VALUE, mesh_of

FACTORIES = {
    "zeros": lambda lib, **where: lib.zeros(7, 5, **where),
    "ones": lambda lib, **where: lib.ones((7, 5), dtype=torch.int64, **where),
    "full": lambda lib, **where: lib.full((7, 5), 2.5, **where),
    "eye": lambda lib, **where: lib.eye(7, 5, **where),
}
RANGES = {
    "arange": lambda lib, **where: lib.arange(1, 20, 3, **where),
    "arange of floats": lambda lib, **where: lib.arange(0.1, 2.0, 0.3, **where),
    "linspace": lambda lib, **where: lib.linspace(0, 1, 9, **where),
}
LIKE = {
    "zeros_like": lambda lib, **where: lib.zeros_like(VALUE, **where),
    "ones_like": lambda lib, **where: lib.ones_like(VALUE, **where),
    "full_like": lambda lib, **where: lib.full_like(VALUE, 3, **where),
    "tensor": lambda lib, **where: lib.tensor(VALUE.tolist(), **where),
    "as_tensor": lambda lib, **where: lib.as_tensor(VALUE.numpy(), **where),
    "from_numpy": lambda lib, **where: lib.from_numpy(VALUE.numpy(), **where),
}


@pytest.mark.parametrize("name", [*FACTORIES, *LIKE])
def test_a_created_tensor_has_the_given_layout(eight_workers, name):
    make = (FACTORIES | LIKE)[name]
    for grid, layout in EVERYWHERE:
        ours = make(gt, mesh=mesh_of(grid), placements=layout)
        assert str(ours.spec) == layout and ours.spec.mesh is mesh_of(grid)
        assert torch.equal(ours.cpu(), make(torch)) and ours.dtype == make(torch).dtype


@pytest.mark.parametrize("name", RANGES)
def test_a_range_has_the_given_layout(eight_workers, name):
    for grid, layout in (("3", "dp"), ("8", "dp"), ("2x4", "tp dp"), ("2x4", "dp + tp"), ("2", "-")):
        ours = RANGES[name](gt, mesh=mesh_of(grid), placements=layout)
        assert str(ours.spec) == layout and torch.equal(ours.cpu(), RANGES[name](torch))


@pytest.mark.parametrize("name", [*FACTORIES, *RANGES])
def test_every_worker_makes_its_own_part(eight_workers, name):
    layout = "tp dp" if name in RANGES else "dp, tp"
    with gt.debug.comm() as comm:
        (FACTORIES | RANGES)[name](gt, mesh=mesh_of("2x4"), placements=layout)
    assert (comm.bytes, comm.events) == (0, [])


def test_creation_on_a_mesh_without_placements_is_whole_everywhere(eight_workers):
    for ours in (
        gt.zeros(3, 4, mesh=mesh_of("2x4")),
        gt.tensor(1.0, mesh=mesh_of("2x4")),
        gt.randn(2, mesh=gt.mesh(3)),
    ):
        assert ours.spec.is_whole and ours.spec.mesh.size > 1
    spec = gt.ShardingSpec(mesh_of("2x4"), [["tp"]])
    assert gt.zeros(9, placements=spec).spec is gt.zeros(9, mesh=spec.mesh, placements=spec).spec is spec


def test_empty_tensors_have_memory_everywhere(eight_workers):
    ours = gt.empty(7, 5, mesh=mesh_of("2x4"), placements="dp, tp")
    ours.copy_(VALUE)
    assert str(ours.spec) == "dp, tp" and torch.equal(ours.cpu(), VALUE)


def test_a_created_tensor_can_require_gradients(eight_workers):
    ours = gt.ones(7, 5, mesh=mesh_of("2x4"), placements="dp, tp", requires_grad=True)
    (ours * gt.distribute(VALUE, mesh_of("2x4"), "tp, -")).sum().backward()
    assert ours.is_leaf and torch.equal(ours.grad.cpu(), VALUE)
