"""`gt.distributed.all_gather` and the others: changes of layout that never change a value."""

import pytest
import torch
import torch.distributed

import gt
from gt.core.errors import LayoutError

VALUE = torch.arange(64.0).reshape(8, 8)  # 256 bytes


def on(layout):
    return gt.distribute(VALUE, gt.mesh((2, 4), ("dp", "tp")), layout)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize(
    ("source", "call", "target", "nbytes"),
    [
        ("dp, tp", lambda x: gt.distributed.all_gather(x, axis="tp"), "dp, -", 8 * 128 * 3 // 4),
        ("dp tp, -", lambda x: gt.distributed.all_gather(x, axis=("dp", "tp")), "-, -", 7 * 256),
        ("dp, -", lambda x: gt.distributed.all_gather(x, axis="tp"), "dp, -", 0),
        ("dp, - + tp", lambda x: gt.distributed.all_reduce(x, axis="tp"), "dp, -", 2 * 2 * 3 * 128),
        ("dp, tp", lambda x: gt.distributed.all_reduce(x, axis="tp"), "dp, tp", 0),
        ("dp, - + tp", lambda x: gt.distributed.reduce_scatter(x, axis="tp", dim=1), "dp, tp", 2 * 3 * 128),
        ("dp, tp", lambda x: gt.distributed.reduce_scatter(x, axis="tp", dim=-1), "dp, tp", 0),
        ("dp, tp", lambda x: gt.distributed.all_to_all(x, axis="tp", dim=0), "dp tp, -", 2 * 128 * 3 // 4),
        ("dp tp, -", lambda x: gt.distributed.all_to_all(x, axis="tp", dim=0), "dp tp, -", 0),
    ],
)
def test_collectives_along_axes(source, call, target, nbytes):
    x = on(source)
    with gt.debug.comm() as c:
        moved = call(x)
    assert (str(moved.spec), c.bytes) == (target, nbytes)
    assert (moved is x) == (source == target)
    assert torch.equal(moved.cpu(), VALUE)


@pytest.mark.usefixtures("eight_workers")
def test_moves_between_meshes():
    x = gt.distribute(VALUE, gt.mesh(2, ("x",)), "x, -")
    other = gt.mesh(2, ("x",), (5, 6))
    assert gt.distributed.send(x, to=other).spec.mesh is other
    assert gt.distributed.send(x, to=7).spec.mesh.workers == (7,)
    assert gt.distributed.broadcast(x, mesh=other).spec.is_whole
    assert torch.equal(gt.distributed.send(x, to=other).cpu(), VALUE)
    with pytest.raises(LayoutError, match="a mesh of the same axes"):
        gt.distributed.send(x, to=gt.mesh(3, ("x",)))


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
def test_nothing_moves_along_an_axis_of_one_worker(name):
    mesh = gt.mesh((1, 2), ("one", "x"))
    x = gt.distribute(VALUE, mesh, "one, x")
    with gt.debug.comm() as c:
        moved = getattr(gt.distributed, name)(x, axis="one")
    assert c.bytes == 0 and torch.equal(moved.cpu(), VALUE)


@pytest.mark.usefixtures("eight_workers")
def test_gradients_pass():
    x = on("dp, tp").requires_grad_()
    (gt.distributed.all_gather(x, axis="tp") * 2).sum().backward()
    assert torch.equal(x.grad.cpu(), torch.full((8, 8), 2.0))


@pytest.mark.usefixtures("eight_workers")
def test_a_call_without_an_axis_is_torchs_own():
    with pytest.raises(Exception, match=r"torch.distributed.*does not work on GT tensors|process group"):
        gt.distributed.all_reduce(on("dp, tp"))
    with pytest.raises(ValueError, match="process group"):
        gt.distributed.all_reduce(torch.ones(2))
    with pytest.raises(LayoutError, match="has no axis 'pp'"):
        gt.distributed.all_gather(on("dp, tp"), axis="pp")
    with pytest.raises(LayoutError, match="dim=2"):
        gt.distributed.all_to_all(on("dp, tp"), axis="tp", dim=2)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: gt.distributed.all_gather(x, axis=0), "axis=0 is no name of an axis"),
        (lambda x: gt.distributed.all_to_all(x, axis="tp", dim=1.5), "dim=1.5 names a dim"),
        (lambda x: gt.distributed.reduce_scatter(x, axis="tp", dim=None), "dim=None names a dim"),
        (lambda x: gt.distributed.send(x, to=3.0), "to=3.0 is neither the number of a worker nor a mesh"),
        (lambda x: gt.distributed.send(x, to=True), "to=True is neither"),
    ],
)
def test_arguments_of_other_types_are_refused(call, reason):
    with pytest.raises(LayoutError, match=reason):
        call(on("dp, tp"))
