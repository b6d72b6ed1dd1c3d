"""Gradients of determinants and solves. Torch's kernels factor the matrix or its transpose, whichever is contiguous,
and autograd asks the client's tensor which one it was. A shard may be contiguous where the whole tensor is not."""

import itertools

import pytest
import torch

import gt

VIEWS = {
    "rows that were skipped": ((10, 5), lambda x: x[::2]),
    "columns that were skipped": ((5, 10), lambda x: x[:, ::2]),
    "a transposed matrix": ((5, 5), lambda x: x.mT),
    "a narrow part of a matrix": ((5, 50), lambda x: x[:, 20:25]),
    "one row of a batch on each worker": ((5, 4, 5), lambda x: x.transpose(0, 1)),
    "matrices that were skipped": ((8, 5, 5), lambda x: x[::2]),
    "an expanded batch": ((1, 5, 5), lambda x: x.expand(4, 5, 5)),
    "a transposed batch": ((4, 5, 5), lambda x: x.mT * 1.5),
}
OPS = {
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet,
    "solve": lambda x: torch.linalg.solve(x, torch.ones_like(x)),
    "solve from the right": lambda x: torch.linalg.solve(x, torch.ones_like(x), left=False),
}
LAYOUTS = [gt.Replicate(), gt.Shard(0), gt.Shard(1)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("view", VIEWS)
def test_gradients_are_torchs_for_every_layout_of_a_view(four_workers, view, op):
    shape, look = VIEWS[view]
    torch.manual_seed(7)
    base = torch.randn(shape, dtype=torch.float64)
    expected = base.clone().requires_grad_()
    OPS[op](look(expected)).square().sum().backward()
    mesh = gt.mesh((2, 2), ("a", "b"))
    for placements in itertools.product(LAYOUTS, LAYOUTS):
        ours = gt.distribute(base, mesh, list(placements)).requires_grad_()
        OPS[op](look(ours)).square().sum().backward()
        torch.testing.assert_close(ours.grad.cpu(), expected.grad)
