"""Products against the reference, in which each worker pulls the tiles that it lacks."""

import pytest
import torch

import gt
from tests.distributed.pulled_tiles import PulledProduct

pytestmark = pytest.mark.usefixtures("eight_workers")


@pytest.mark.parametrize(
    ("mesh", "left", "right", "out"),
    [
        ((4,), "x, -", "x, -", "x, -"),
        ((4,), "-, x", "-, x", "-, x"),
        ((4,), "x, -", "-, x", "x, -"),
        ((3,), "-, x", "x, -", "x, -"),
        ((2, 2), "x, y", "x, y", "x, y"),
        ((2, 4), "x, y", "x, y", "x, y"),
        ((2, 4), "y x, -", "-, x y", "y, x"),
    ],
)
def test_a_stationary_result_moves_what_each_worker_lacks(mesh, left, right, out):
    """No algorithm that computes each element of the result on one worker receives less."""
    mesh = gt.mesh(mesh, ("x", "y")[: len(mesh)])
    a, b = torch.randn(6, 5), torch.randn(5, 7)
    x, y = gt.distribute(a, mesh, left), gt.distribute(b, mesh, right)
    with gt.debug.comm() as c:
        found = gt.distributed.matmul(x, y, out=out, algo="stationary_c")
    reference = PulledProduct(a.double(), x.spec, b.double(), y.spec, found.spec, tile=2)
    assert c.bytes == 4 * reference.pulled
    value = found.cpu().double()
    for worker, part in found.shards().items():
        torch.testing.assert_close(value[part.slice], reference.parts[worker], rtol=1e-5, atol=1e-5)
