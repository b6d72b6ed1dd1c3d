"""`gt.distributed.matmul` in any layouts on any meshes: torch's results and gradients, bytes at most those of the best
chain of collectives along one axis, and plans whose bytes are the counted ones."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gt
from gt.core.errors import LayoutError
from gt.sharding.rules.support.product_algorithms import PRODUCT_ALGORITHMS
from tests.distributed.collective_chains import DIM_OF, fewest_bytes, states

M, K, N = 64, 128, 32

MESHES = [
    ((1,), (0,)),
    ((1,), (5,)),
    ((2,), (0, 1)),
    ((2,), (6, 1)),
    ((3,), (2, 3, 4)),
    ((4,), (0, 1, 2, 3)),
    ((4,), (4, 5, 6, 7)),
    ((7,), tuple(range(7))),
    ((8,), tuple(range(8))),
    ((2, 2), (0, 1, 2, 3)),
    ((2, 2), (1, 3, 5, 7)),
    ((2, 4), tuple(range(8))),
    ((3, 2), (5, 4, 3, 2, 1, 0)),
    ((2, 2, 2), tuple(range(8))),
]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.complex64, torch.bfloat16]
SHAPES = [
    ((6, 5), (5, 7)),
    ((6, 5), (5, 7)),
    ((1, 9), (9, 1)),
    ((0, 4), (4, 3)),
    ((4, 0), (0, 3)),
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((3, 4, 5), (3, 5, 2)),
    ((3, 4, 5), (5, 2)),
    ((4, 1, 6, 5), (1, 3, 5, 2)),
    ((5,), (2, 5, 3)),
]


# --- The fewest bytes of collectives along one axis ------------------------------------------------------------------


def placed(tensor, letters):
    others = {"R": gt.Replicate(), "P": gt.Partial()}
    dims = {letter: gt.Shard(dim) for letter, dim in DIM_OF[tensor].items()}
    return [(others | dims)[letter] for letter in letters]


VALUES = {"a": torch.randn(M, K), "b": torch.randn(K, N)}


def operand(tensor, letters, mesh):
    """A new tensor, of which no copies exist in other layouts."""
    return laid_out(VALUES[tensor], mesh, placed(tensor, letters))


def laid_out(value, mesh, placements):
    return gt.distribute(value, mesh, [gt.Replicate()] * len(mesh.shape)).redistribute(mesh, list(placements))


def check_bytes(mesh, a, b, out):
    x, y = operand("a", a, mesh), operand("b", b, mesh)
    plan = gt.distributed.explain(x, y, out=placed("c", out))
    with gt.debug.comm() as c:
        product = gt.distributed.matmul(x, y, out=placed("c", out))
    assert (c.bytes, c.pairs) == (plan.bytes, plan.pairs), (a, b, out)
    assert c.bytes <= fewest_bytes(mesh.shape, a, b, out, (M, K, N)) + 1e-6, (a, b, out)
    torch.testing.assert_close(product.cpu(), VALUES["a"] @ VALUES["b"], rtol=1e-4, atol=1e-4)


def all_pairs(axes):
    return itertools.product(states("a", axes), states("b", axes))


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize(("a", "b"), list(all_pairs(1)))
def test_every_pair_of_layouts_on_one_axis_moves_no_more_than_the_table_says(a, b):
    for out in states("c", 1):
        check_bytes(gt.mesh(4, ("x",)), a, b, out)


def check_two_axes(a, b, outs):
    for out in outs:
        check_bytes(gt.mesh((2, 4), ("x", "y")), a, b, out)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("number", range(0, 256, 11))
def test_pairs_of_layouts_on_two_axes_move_no_more_than_chains_of_collectives(number):
    a, b = list(all_pairs(2))[number]
    check_two_axes(a, b, [states("c", 2)[number % 16], states("c", 2)[(number * 7 + 3) % 16]])


@pytest.mark.slow
@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize(("a", "b"), list(all_pairs(2)))
def test_every_pair_of_layouts_on_two_axes_moves_no_more_than_chains_of_collectives(a, b):
    check_two_axes(a, b, states("c", 2))


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize(
    ("shape", "a", "b", "out", "nbytes"),
    [
        ((4,), "R", "R", "R", 0),
        ((4,), "M", "R", "M", 0),
        ((4,), "R", "N", "N", 0),
        ((4,), "K", "K", "P", 0),
        ((4,), "K", "K", "R", 49152),
        ((4,), "K", "K", "M", 24576),
        ((4,), "M", "N", "M", 49152),
        ((4,), "M", "K", "M", 49152),
        ((4,), "K", "R", "M", 24576),
        ((4,), "R", "K", "N", 12288),
        ((4,), "P", "R", "R", 49152),
        ((4,), "M", "R", "R", 24576),
        ((2, 4), "MR", "RN", "MN", 0),
        ((2, 4), "MK", "KN", "MN", 65536),
        ((2, 4), "MK", "RK", "MN", 24576),
        ((2, 4), "MK", "RK", "MR", 49152),
        ((2, 4), "RK", "NK", "NR", 49152),
        ((2, 4), "KK", "KK", "RR", 114688),
        ((2, 4), "MR", "KN", "MN", 16384),
        ((2, 4), "PR", "RN", "PN", 0),
    ],
)
def test_the_golden_numbers(shape, a, b, out, nbytes):
    """The oracle gives them too. Direct pulls may move less."""
    mesh = gt.mesh(shape, ("x", "y")[: len(shape)])
    assert fewest_bytes(shape, a, b, out, (M, K, N)) == nbytes
    x, y = operand("a", a, mesh), operand("b", b, mesh)
    with gt.debug.comm() as c:
        gt.distributed.matmul(x, y, out=placed("c", out))
    assert c.bytes == (53248 if (a, b, out) == ("MK", "KN", "MN") else nbytes)


# --- Any meshes, shapes and dtypes -----------------------------------------------------------------------------------


@st.composite
def tensors(draw, shape, dtype):
    """A plain tensor, and the same on GT on some mesh, in some layout, perhaps as a transposed view."""
    value = torch.randn(shape).mul(4).to(dtype) if dtype != torch.bool else torch.rand(shape) > 0.5
    sizes, workers = draw(st.sampled_from(MESHES))
    mesh = gt.mesh(sizes, ("x", "y", "z")[: len(sizes)], workers)
    choices = [gt.Replicate(), gt.Partial(), *[gt.Shard(dim) for dim in range(len(shape))]]
    placements = [draw(st.sampled_from(choices)) for _ in sizes]
    if len(shape) > 1 and draw(st.booleans()):
        swapped = [gt.Shard(_swap(p.dim, len(shape))) if isinstance(p, gt.Shard) else p for p in placements]
        return value, laid_out(value.mT.contiguous(), mesh, swapped).mT
    return value, laid_out(value, mesh, placements)


def _swap(dim, rank):
    return {rank - 1: rank - 2, rank - 2: rank - 1}.get(dim, dim)


def tolerance(dtype):
    return {"rtol": 3e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.usefixtures("eight_workers")
@settings(max_examples=60)
@given(st.data())
def test_any_meshes_shapes_and_dtypes_by_any_algorithm(data):
    left, right = data.draw(st.sampled_from(SHAPES))
    dtype = data.draw(st.sampled_from(DTYPES))
    a, x = data.draw(tensors(left, dtype))
    b, y = data.draw(tensors(right, dtype))
    expected = torch.matmul(a, b)
    sizes, workers = data.draw(st.sampled_from(MESHES))
    mesh = gt.mesh(sizes, ("x", "y", "z")[: len(sizes)], workers)
    choices = [gt.Replicate(), gt.Partial(), *[gt.Shard(dim) for dim in range(expected.dim())]]
    out = data.draw(st.none() | st.tuples(*[st.sampled_from(choices)] * len(sizes)).map(list))
    algo = data.draw(st.sampled_from([None, None, *PRODUCT_ALGORITHMS]))
    arguments = {"out": out, "mesh": mesh, "algo": algo, "panel": data.draw(st.integers(0, 3))}
    try:
        plan = gt.distributed.explain(x, y, **arguments)
    except LayoutError:
        with pytest.raises(LayoutError, match="does not fit"):
            gt.distributed.matmul(x, y, **arguments)
        return
    with gt.debug.comm() as c:
        found = gt.distributed.matmul(x, y, **arguments)
    assert (c.bytes, c.pairs) == (plan.bytes, plan.pairs)
    assert found.spec is plan.out
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found.cpu(), expected, **tolerance(dtype))


@pytest.mark.usefixtures("eight_workers")
@settings(max_examples=25)
@given(st.data())
def test_gradients_are_torchs(data):
    left, right = data.draw(st.sampled_from([pair for pair in SHAPES if 0 not in pair[0]]))
    dtype = data.draw(st.sampled_from([torch.float64, torch.complex128]))
    a, x = data.draw(tensors(left, dtype))
    b, y = data.draw(tensors(right, dtype))
    mine, theirs = [x.detach().requires_grad_(), y.detach().requires_grad_()], [a.requires_grad_(), b.requires_grad_()]
    algo = data.draw(st.sampled_from([None, "gather_b", "inner", "stationary_c"]))
    product = gt.distributed.matmul(*mine, mesh=x.spec.mesh, algo=algo)
    expected = torch.matmul(*theirs)
    weights = torch.randn(expected.shape, dtype=dtype)
    product.backward(gt.distribute(weights, x.spec.mesh, [gt.Replicate()] * len(x.spec.mesh.shape)))
    expected.backward(weights)
    for own, plain in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own.grad.cpu(), plain.grad)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("algo", ["summa", "ring", "cannon", "2.5d"])
def test_rounds_on_workers_that_hold_no_operand(algo):
    """Only the workers of the mesh take part in rounds, so operands are moved there before."""
    source, mesh = gt.mesh(3, ("x",), (0, 1, 2)), gt.mesh((2, 2), ("x", "y"), (1, 3, 5, 7))
    mesh = mesh if algo != "2.5d" else gt.mesh(8, ("x",))
    a, b = torch.randn(6, 8), torch.randn(8, 4)
    x, y = gt.distribute(a, source, "-, x"), gt.distribute(b, source, "x, -")
    plan = gt.distributed.explain(x, y, mesh=mesh, algo=algo)
    with gt.debug.comm() as c:
        product = gt.distributed.matmul(x, y, mesh=mesh, algo=algo)
    assert (c.bytes, c.pairs) == (plan.bytes, plan.pairs)
    assert set(product.spec.mesh.workers) == set(mesh.workers)
    torch.testing.assert_close(product.cpu(), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eight_workers")
def test_a_view_of_a_tensor_of_another_mesh_moves_its_parts_only():
    source, mesh = gt.mesh(1, ("x",)), gt.mesh(2, ("x",))
    a, b = gt.distribute(torch.ones(6, 5), source, "-, -"), gt.distribute(torch.ones(8, 5), source, "-, -").mT
    with gt.debug.comm() as c:
        gt.distributed.matmul(a, b, mesh=mesh, algo="gather_a")
    assert c.bytes == 4 * (6 * 5 + 4 * 5), "half of the columns, not all of them"


@pytest.mark.usefixtures("eight_workers")
def test_plain_tensors_are_laid_out_in_the_best_grid():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    plan = gt.distributed.explain(a, b, mesh=gt.mesh(8, ("x",)))
    with gt.debug.comm() as c:
        product = gt.distributed.matmul(a, b, mesh=gt.mesh(8, ("x",)))
    assert product.spec.mesh.shape == (2, 2, 2) and c.bytes == plan.bytes == 3 * 64 * 64 * 4
    torch.testing.assert_close(product.cpu(), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("pair", SHAPES)
def test_plain_tensors_of_any_rank_inside_an_open_mesh(pair):
    a, b = map(torch.randn, pair)
    with gt.open_mesh((2, 4), ("x", "y")) as mesh:
        free = gt.distributed.matmul(a, b)
        asked = gt.distributed.matmul(a, b, out=[gt.Replicate()] * 2)
    assert asked.spec.mesh is mesh and set(free.spec.mesh.workers) == set(mesh.workers)
    torch.testing.assert_close(free.cpu(), torch.matmul(a, b), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(asked.cpu(), torch.matmul(a, b), rtol=1e-4, atol=1e-4)
