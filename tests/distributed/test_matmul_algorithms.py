"""`gt.distributed.matmul` by each algorithm, in any layouts: torch's results, and the bytes of the textbook."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gt
from gt.core.errors import LayoutError
from gt.sharding.rules.support.product_algorithms import PRODUCT_ALGORITHMS

MESHES = {
    "1": ((1,), ("x",)),
    "3": ((3,), ("x",)),
    "4": ((4,), ("x",)),
    "8": ((8,), ("x",)),
    "2x2": ((2, 2), ("x", "y")),
    "2x4": ((2, 4), ("x", "y")),
    "2x2x2": ((2, 2, 2), ("x", "y", "z")),
}
FITS_ALL = ("gather_a", "gather_b", "inner", "summa", "ring")


def placements(mesh, rank):
    options = [gt.Replicate(), gt.Partial(), *[gt.Shard(dim) for dim in range(rank)]]
    return st.tuples(*[st.sampled_from(options)] * len(mesh.shape))


def laid_out(value, mesh, placed):
    return gt.distribute(value, mesh, [gt.Replicate()] * len(placed)).redistribute(mesh, list(placed))


@pytest.mark.usefixtures("eight_workers")
@settings(max_examples=60)
@given(st.data())
def test_every_algorithm_gives_torchs_product(data):
    mesh = gt.mesh(*MESHES[data.draw(st.sampled_from(sorted(MESHES)))])
    rows, inner, columns = [data.draw(st.integers(1, 9)) for _ in range(3)]
    batch = data.draw(st.sampled_from([(), (), (3,)]))
    a, b = torch.randn(*batch, rows, inner), torch.randn(*batch, inner, columns)
    layouts = [data.draw(placements(mesh, value.dim())) for value in (a, b)]
    out = data.draw(st.none() | placements(mesh, a.dim()))
    algo = data.draw(st.sampled_from([None, *FITS_ALL]))
    panel = data.draw(st.integers(0, 4))
    x, y = laid_out(a, mesh, layouts[0]), laid_out(b, mesh, layouts[1])
    found = gt.distributed.matmul(x, y, out=list(out) if out is not None else None, algo=algo, panel=panel)
    if out is not None:
        assert found.spec.mesh is mesh
    torch.testing.assert_close(found.cpu(), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize(
    ("mesh", "left", "right", "out", "algo", "nbytes"),
    [  # 64x128 @ 128x32 in float32: a = 32768, b = 16384, c = 8192 bytes
        ("4", "x, -", "-, -", "x, -", "local", 0),
        ("4", "x, -", "x, -", "x, -", "gather_b", 3 * 16384),
        ("4", "-, x", "-, x", "-, x", "gather_a", 3 * 32768),
        ("4", "-, x", "x, -", "x, -", "inner", 3 * 8192),
        ("4", "x, -", "x, -", "x, -", "ring", 3 * 16384),
        ("2x4", "x, y", "x, y", "x, y", "stationary_c", 3 * 32768 + 16384),
        ("2x4", "x, y", "x, y", "x, y", "summa", 3 * 32768 + 16384),
        ("2x4", "x, y", "x, y", "x, y", "stationary_a", 53248),  # direct pulls: 65536 by collectives along one axis
        ("2x2", "x, y", "x, y", "x, y", "cannon", (1 + 1 / 2) * (32768 + 16384)),
        ("2x2x2", "x, z y", "z x, y", "x, y + z", "2.5d", 32768 + 16384),
        ("2x2x2", "x, z y", "z x, y", "x z, y", "2.5d", 32768 + 16384 + 8192),
    ],
)
def test_an_algorithm_moves_the_bytes_of_the_textbook(mesh, left, right, out, algo, nbytes):
    mesh = gt.mesh(*MESHES[mesh])
    a, b = gt.distribute(torch.randn(64, 128), mesh, left), gt.distribute(torch.randn(128, 32), mesh, right)
    with gt.debug.comm() as c:
        product = gt.distributed.matmul(a, b, out=out, algo=algo)
    assert c.bytes == nbytes and sum(event.bytes for event in c.events) == nbytes
    assert str(product.spec) == out
    torch.testing.assert_close(product.cpu(), a.cpu() @ b.cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("algo", ["summa", "ring", "cannon"])
def test_sums_of_rounds_of_bfloat16_are_kept_in_float32(algo):
    mesh = gt.mesh((2, 2), ("x", "y"))
    a, b = torch.randn(32, 512).bfloat16(), torch.randn(512, 32).bfloat16()
    x, y = gt.distribute(a, mesh, "x, y"), gt.distribute(b, mesh, "x, y")
    found = gt.distributed.matmul(x, y, out="x, y", algo=algo, panel=16).cpu()
    exact = a.double() @ b.double()
    plain = (a @ b).double()
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5,), (5,)),
        ((5,), (5, 3)),
        ((4, 5), (5,)),
        ((4, 1, 6, 5), (1, 3, 5, 2)),
        ((2, 4, 5), (5, 3)),
        ((5,), (2, 5, 3)),
    ],
)
@pytest.mark.parametrize("algo", [None, "gather_b", "stationary_c"])
def test_any_ranks_with_gradients(left, right, algo):
    mesh = gt.mesh(4, ("x",))
    plain = [torch.randn(*shape, requires_grad=True) for shape in (left, right)]
    moved = [gt.distribute(value.detach(), mesh, [gt.Shard(0)]).requires_grad_() for value in plain]
    product = gt.distributed.matmul(*moved, out=[gt.Replicate()], algo=algo)
    expected = torch.matmul(*plain)
    torch.testing.assert_close(product.cpu(), expected.detach())
    weights = torch.randn(expected.shape)
    (expected * weights).sum().backward()
    (product * weights).sum().backward()
    for mine, theirs in zip(moved, plain, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


@pytest.mark.usefixtures("eight_workers")
def test_a_broadcast_batch_is_laid_out_as_asked_without_a_move_of_the_product():
    mesh = gt.mesh(4, ("x",))
    a = gt.ones(4, 1, 64, 64, mesh=mesh, placements="x, -, -, -")
    b = gt.distribute(torch.ones(1, 1, 64, 128), mesh, [gt.Replicate()])
    with gt.debug.comm() as c:
        product = gt.distributed.matmul(a, b, out="x, -, -, -")
    assert c.bytes == 0 and product.shape == (4, 1, 64, 128) and product[3, 0, 5, 7].item() == 64


@pytest.mark.usefixtures("eight_workers")
def test_a_bias_is_added_once():
    mesh = gt.mesh(4, ("x",))
    a, b, bias = torch.randn(6, 8), torch.randn(8, 5), torch.randn(5)
    x, y = gt.distribute(a, mesh, "-, x"), gt.distribute(b, mesh, "x, -")
    for out in (None, "-, -", "x, -", "-, - + x"):
        found = gt.distributed.matmul(x, y, out=out, bias=bias)
        torch.testing.assert_close(found.cpu(), a @ b + bias)


@pytest.mark.usefixtures("eight_workers")
def test_an_algorithm_that_does_not_fit_is_refused_on_the_users_line():
    mesh = gt.mesh((2, 4), ("x", "y"))
    a, b = gt.distribute(torch.ones(4, 4), mesh, "x, y"), gt.distribute(torch.ones(4, 4), mesh, "x, y")
    with pytest.raises(LayoutError, match="'cannon' does not fit operands 4x4 and 4x4"):
        gt.distributed.matmul(a, b, algo="cannon")
    with pytest.raises(LayoutError, match="there is no algorithm 'suma'.*summa"):
        gt.distributed.matmul(a, b, algo="suma")


def test_an_ordinary_product_of_a_large_operand_runs_in_panels(eight_workers, monkeypatch):
    """The largest copy is set to a few bytes here."""
    monkeypatch.setattr("gt.sharding.schedule_programs.LARGEST_COPY", 1000)
    mesh = gt.mesh(4, ("x",))
    a, b = torch.randn(64, 96), torch.randn(96, 40)
    x, y = gt.distribute(a, mesh, "x, -"), gt.distribute(b, mesh, "x, -")
    with gt.debug.comm() as c:
        product = x @ y
    assert c.count("shift") + c.count("broadcast") >= 3, "the operand is taken in rounds"
    assert c.bytes == 3 * 96 * 40 * 4, "the same bytes as a gather"
    torch.testing.assert_close(product.cpu(), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eight_workers")
def test_the_table_of_algorithms_is_the_one_that_the_docstring_lists():
    text = PRODUCT_ALGORITHMS["ring"].__globals__["__doc__"]
    assert all(f"`{name}`" in text for name in PRODUCT_ALGORITHMS)
