"""Parts of a tensor at other places along an axis."""

import pytest
import torch

import gt
from gt.core.errors import LayoutError
from gt.distributed import axis_index, ppermute

pytestmark = pytest.mark.usefixtures("eight_workers")
VALUE = torch.arange(128.0).reshape(8, 16)
SWAP, SHIFT_OUT = [(0, 1), (1, 0)], [(0, 1)]
RING = [(source, (source + 1) % 8) for source in range(8)]


def permuted(x, axis, pairs):
    """What programs of one rank each, which send their parts, have in the end."""
    value, mesh, shards = x.detach().cpu(), x.spec.mesh, x.shards()
    place, result = mesh.axis_names.index(axis), torch.zeros_like(value)
    for worker, coordinate in mesh.coordinates().items():
        for source, target in pairs:
            if coordinate[place] == target:
                sender = mesh.at((*coordinate[:place], source, *coordinate[place + 1 :]))
                result[shards[worker].slice] = value[shards[sender].slice]
    return result


@pytest.mark.parametrize("pairs", [SWAP, SHIFT_OUT, [(1, 1)], []], ids=str)
@pytest.mark.parametrize("layout", ["a, -", "a b, -", "c b a, -", "b a c, -", "-, b c", "c, b a"])
def test_parts_move_as_ranks_would_send_them(layout, pairs):
    x = gt.distribute(VALUE, gt.mesh((2, 2, 2), ("a", "b", "c")), layout)
    for axis in x.spec.axes:
        y = ppermute(x, axis, pairs)
        assert y.spec is x.spec and torch.equal(y.cpu(), permuted(x, axis, pairs))


@pytest.mark.parametrize("pairs", [RING, RING[:-1], [(i, 7 - i) for i in range(8)]], ids=["ring", "line", "mirror"])
def test_each_part_moves_once_and_its_gradient_back(pairs):
    mesh = gt.mesh(8, ("x",))
    x = gt.distribute(VALUE, mesh, "x, -").requires_grad_()
    weights = gt.distribute(torch.randn(8, 16), mesh, "x, -")
    with gt.debug.comm() as c:
        y = ppermute(x, "x", pairs)
        (y * weights).sum().backward()
    assert c.bytes <= 2 * len(pairs) * 64 + 8 * 2 * 4, "and the sum of the eight numbers"
    back = permuted(weights, "x", [(target, source) for source, target in pairs])
    assert torch.equal(y.detach().cpu(), permuted(x, "x", pairs)) and torch.equal(x.grad.cpu(), back)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_derivatives():
    mesh = gt.mesh(2, ("x",))
    x = gt.randn(4, 2, dtype=torch.float64, mesh=mesh, placements="x, -").requires_grad_()
    assert torch.autograd.gradcheck(lambda a: ppermute(a, "x", SWAP), x)
    assert torch.autograd.gradgradcheck(lambda a: ppermute(a * a, "x", SHIFT_OUT), x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach() * 2)
        tangent = torch.autograd.forward_ad.unpack_dual(ppermute(dual, "x", SWAP)).tangent
    assert torch.equal(tangent.cpu(), permuted(x, "x", SWAP) * 2)


def test_copies_and_addends_may_change_places():
    mesh = gt.mesh(2, ("x",))
    for layout in ("-, -", "-, - + x"):
        x = gt.distribute(VALUE, mesh, layout)
        assert ppermute(x, "x", SWAP) is x
        with pytest.raises(LayoutError, match="is not cut along 'x'"):
            ppermute(x, "x", SHIFT_OUT)


@pytest.mark.parametrize("shape", [(0, 16), (8, 0)])
def test_empty_tensors(shape):
    x = gt.distribute(torch.ones(shape), gt.mesh(2, ("x",)), "x, -")
    assert ppermute(x, "x", SHIFT_OUT).shape == shape


@pytest.mark.parametrize(
    ("axis", "pairs", "message"),
    [
        ("y", SWAP, "has no axis 'y'; it has x"),
        ("x", [(0, 1), (0, 0)], "each is a source once at most"),
        ("x", [(0, 1), (1, 1)], "once a destination"),
        ("x", [(0, 2)], "are the indices 0 to 1"),
        ("x", [0, 1], "is no list of pairs"),
        ("x", None, "is no list of pairs"),
        ("x", [(0.5, 1)], "is no list of pairs"),
    ],
)
def test_pairs_that_make_no_sense(axis, pairs, message):
    with pytest.raises(LayoutError, match=message):
        ppermute(gt.distribute(VALUE, gt.mesh(2, ("x",)), "x, -"), axis, pairs)


def test_parts_of_other_sizes_stay():
    with pytest.raises(LayoutError, match=r"have the sizes \[2, 1\]"):
        ppermute(gt.distribute(torch.ones(3), gt.mesh(2, ("x",)), "x"), "x", SWAP)


def test_each_worker_holds_its_index():
    mesh = gt.mesh((2, 4), ("a", "b"))
    held = {worker: shard.data.tolist() for worker, shard in axis_index("b", mesh).shards().items()}
    assert held == {worker: [column] for worker, (_, column) in mesh.coordinates().items()}
    with gt.open_mesh(mesh):
        assert axis_index("a").tolist() == [0, 1]
    with pytest.raises(LayoutError, match="has no axis 'c'; it has a, b"):
        axis_index("c", mesh)
