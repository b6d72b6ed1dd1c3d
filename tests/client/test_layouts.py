"""Explicit layouts: meshes, distribution, redistribution and gradients."""

import itertools

import numpy as np
import pytest
import torch

import gt
from tests.client.layout_cases import EVERYWHERE, LAYOUTS, VALUE, mesh_of


@pytest.fixture(scope="module")
def pair_of_pairs(eight_workers):
    return gt.mesh(2, ("x",)), gt.mesh(2, ("x",), workers=[3, 2])


def test_a_mesh_takes_the_first_workers(eight_workers):
    mesh = gt.mesh((2, 2), ("dp", "tp"))
    assert (mesh.shape, mesh.axis_names, mesh.workers) == ((2, 2), ("dp", "tp"), (0, 1, 2, 3))
    assert isinstance(mesh, gt.DeviceMesh) and mesh is gt.mesh((2, 2), ("dp", "tp"))
    assert gt.mesh(3).workers == (0, 1, 2) and gt.mesh(3) is gt.mesh((3,), ("axis0",))


def test_a_mesh_takes_the_workers_that_are_named(eight_workers):
    mesh = gt.mesh((2, 2), ("dp", "tp"), workers=[7, 1, 4, 2], name="odd")
    assert str(mesh) == "odd(dp=2, tp=2) of workers [7, 1, 4, 2]"
    assert gt.distribute(VALUE, mesh, "dp, -").shards().keys() == {7, 1, 4, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ((3, 3),),
            r"shape \(3, 3\) needs 9 workers, and there are \[0, .*, 7\]; start more with gt.init\(workers=9\)",
        ),
        (((9,),), "or GT_WORKERS=9$"),
        ((2, "x", [0, 11]), r"needs workers \[11\], and there are .*; start more with gt.init\(workers=12\)"),
        ((2, "x", [0]), r"a mesh of shape \(2,\) needs 2 workers, not 1"),
        ((2, "x", [0, 1, 2]), r"needs 2 workers, not 3"),
        ((2, "x", [1, 1]), r"a worker has one place in a mesh; \[1, 1\] names one twice"),
        (((2, 2), ("dp",)), "needs 2 different axis names"),
        ((0,), r"at least one worker along every axis; its shape cannot be \(0,\)"),
        (((2, -1),), r"its shape cannot be \(2, -1\)"),
        (("2",), r"a whole number of workers along each axis; its shape cannot be '2': say it as in gt\.mesh\(2\)"),
        ((1.5,), r"its shape cannot be 1\.5: say it"),
    ],
)
def test_a_mesh_that_cannot_be(eight_workers, arguments, message):
    with pytest.raises(gt.LayoutError, match=message):
        gt.mesh(*arguments)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda x, mesh: gt.distribute(x, mesh, "dp"), r"\[dp\] lays out a tensor of 1 dims, and this one has 2"),
        (lambda x, mesh: gt.distribute(x, mesh, "dp, ep"), r"mesh \(dp=2, tp=4\) has no axis 'ep'; it has dp, tp"),
        (lambda x, mesh: gt.distribute(x, mesh, "dp, dp"), "mesh axis 'dp' is used twice in one spec"),
        (lambda x, mesh: gt.distribute(x, mesh, "dp; tp"), "'dp; tp' in 'dp; tp' is not a dim of a spec"),
        (lambda x, mesh: gt.distribute(x, mesh, "-, - + dp:mean"), "'mean' is no reduction of a partial tensor"),
        (
            lambda x, mesh: gt.distribute(x, mesh, gt.Shard(0)),
            r"mesh \(dp=2, tp=4\) needs a placement for each of its 2",
        ),
        (
            lambda x, mesh: gt.distribute(x, mesh, [gt.Shard(2)] * 2),
            r"Shard\(dim=2\) names a dim that a tensor of 2 dims",
        ),
        (lambda x, mesh: gt.distribute(x, mesh, ["dp", "tp"]), "'dp' is not a placement: use gt.Shard"),
        (lambda x, mesh: gt.distribute(x, mesh, [gt.Partial("max"), gt.Partial()]), "different kinds at once"),
        (
            lambda x, mesh: gt.distribute(x, mesh, gt.ShardingSpec(gt.mesh(2), [[], []])),
            "is a spec of mesh .axis0=2., not",
        ),
        (lambda x, mesh: gt.shard(x, mesh, 2), r"Shard\(dim=2\) names a dim"),
        (lambda x, mesh: gt.shard(x.sum(), mesh), r"a tensor of 0 dims"),
        (lambda x, mesh: gt.to(x).redistribute(placements="dp, -"), "has no axis 'dp'; it has w"),
        (
            lambda x, mesh: gt.zeros(3, placements="dp"),
            r"placements= needs mesh=: say over which workers, as in mesh=gt\.",
        ),
        (lambda x, mesh: gt.tensor(x, placements=[gt.Shard(0)]), "placements= needs mesh="),
        (lambda x, mesh: gt.zeros(3, mesh=mesh, placements="dp, tp"), r"\[dp, tp\] lays out a tensor of 2 dims"),
        (lambda x, mesh: gt.rand(3, mesh=mesh, placements=gt.Shard(0)), "a placement for each of its 2 axes, not 1"),
        (lambda x, mesh: gt.distribute(x, None, "w"), r"no mesh is given, and none is open: say mesh=gt\.mesh"),
        (lambda x, mesh: gt.shard(x, None), "no mesh is given"),
        (lambda x, mesh: gt.replicate(x, 7), "7 is not a mesh"),
        (lambda x, mesh: gt.to(x).redistribute(7), "7 is not a mesh"),
        (lambda x, mesh: gt.zeros(3, mesh=7), "7 is not a mesh"),
        (lambda x, mesh: gt.zeros(3, mesh=7, placements="dp"), "7 is not a mesh"),
        (lambda x, mesh: gt.zeros(3, mesh=mesh, placements=7), "7 is not a placement: use gt.Shard"),
        (lambda x, mesh: gt.distribute(x, mesh, 7), "7 is not a placement"),
        (lambda x, mesh: gt.distribute(x, mesh, [gt.Shard("a")] * 2), r"Shard\(dim='a'\) names no dim: .*whole number"),
        (lambda x, mesh: gt.zeros(3, mesh=gt.mesh(2), placements=gt.Shard(0.5)), r"Shard\(dim=0\.5\) names no dim"),
        (lambda x, mesh: gt.shard([1, 2], mesh), r"list is not a tensor.*make one, with gt\.tensor\(data\)"),
        (lambda x, mesh: mesh.submesh(dp=2), "axis 'dp' of mesh .* has coordinates 0 to 1"),
    ],
)
def test_layouts_that_make_no_sense_are_refused_on_the_line(eight_workers, attempt, message):
    with pytest.raises(gt.LayoutError, match=message):
        attempt(VALUE, mesh_of("2x4"))
    gt.synchronize()


@pytest.mark.parametrize(
    ("lay_out", "spec"),
    [
        (lambda x, mesh: gt.distribute(x, mesh, [gt.Shard(0), gt.Shard(1)]), "dp, tp"),
        (lambda x, mesh: gt.distribute(x, mesh, (gt.Shard(-1), gt.Replicate())), "-, dp"),
        (lambda x, mesh: gt.distribute(x, mesh, [gt.Shard(1), gt.Shard(1)]), "-, dp tp"),
        (lambda x, mesh: gt.distribute(x, mesh, [gt.Partial(), gt.Shard(0)]), "tp, - + dp"),
        (lambda x, mesh: gt.distribute(x, mesh, [gt.Partial("max")] * 2), "-, - + dp tp:max"),
        (lambda x, mesh: gt.distribute(x, mesh, "tp dp,-"), "tp dp, -"),
        (lambda x, mesh: gt.distribute(x, mesh, gt.ShardingSpec(mesh, [["tp"], []])), "tp, -"),
        (lambda x, mesh: gt.distribute(x, mesh, "dp[0:1 1:7], -"), "dp[0:1 1:7], -"),
        (lambda x, mesh: gt.distribute(x, mesh, "dp[0:4 4:7], -"), "dp, -"),  # as it would be cut anyway
        (lambda x, mesh: gt.distribute(x, mesh.submesh(dp=1), gt.Shard(1)), "-, tp"),
        (lambda x, mesh: gt.shard(x, mesh), "dp tp, -"),
        (lambda x, mesh: gt.shard(x, mesh, 1), "-, dp tp"),
        (lambda x, mesh: gt.shard(x, mesh, dim=-2), "dp tp, -"),
        (lambda x, mesh: gt.replicate(x, mesh), "-, -"),
    ],
)
def test_a_tensor_is_laid_out_as_said(eight_workers, lay_out, spec):
    for start in (VALUE, gt.to(VALUE), gt.shard(VALUE, gt.mesh(3))):
        ours = lay_out(start, mesh_of("2x4"))
        assert isinstance(ours, gt.Tensor) and str(ours.spec) == spec
        assert torch.equal(ours.cpu(), VALUE)
        assert torch.equal((ours * 2).cpu(), VALUE * 2)


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda x, mesh: gt.shard(x, mesh, 1),
        lambda x, mesh: gt.replicate(x, mesh),
        lambda x, mesh: gt.distribute(x, mesh, "-, rows"),
        lambda x, mesh: gt.from_torch(x, "int64", mesh=mesh),
        lambda x, mesh: gt.from_shards([x[:2], x[2:]], mesh, "rows, -"),
        lambda x, mesh: gt.distributed.broadcast(x, mesh=mesh),
        lambda x, mesh: gt.distributed.send(x, to=1),
    ],
)
def test_an_array_is_laid_out_as_a_tensor_is(eight_workers, lay_out):
    mesh, array = gt.mesh(2, ("rows",)), np.arange(12).reshape(4, 3)
    found = lay_out(array, mesh)
    assert found.tolist() == array.tolist() and found.spec is lay_out(torch.from_numpy(array), mesh).spec


def test_the_names_of_gt_distributed_are_the_same(eight_workers):
    for name in ("distribute", "shard", "replicate", "Shard", "Replicate", "Partial", "DeviceMesh", "ShardingSpec"):
        assert getattr(gt.distributed, name) is getattr(gt, name)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_every_kind_of_tensor_can_be_laid_out(eight_workers, dtype):
    for shape, texts in {
        (): ["", "+ dp"],
        (1,): ["tp dp", "dp + tp", "-"],
        (0, 3): ["tp dp, -", "-, tp + dp"],
        (3, 5): ["tp dp, -", "dp, - + tp", "-, tp"],
    }.items():
        value = (torch.arange(torch.Size(shape).numel()).reshape(shape) - 4).to(dtype)
        for text in texts:
            assert torch.equal(gt.distribute(value, mesh_of("2x4"), text).cpu(), value)


def test_any_layout_becomes_any_other(eight_workers):
    for source in LAYOUTS["2x4"]:
        ours = gt.distribute(VALUE, mesh_of("2x4"), source)
        for target in LAYOUTS["2x4"]:
            again = ours.redistribute(placements=target)
            assert str(again.spec) == target and torch.equal(again.cpu(), VALUE)
        assert str(ours.spec) == source


@pytest.mark.parametrize("source", ["2", "3", "8", "2x4", "2x2x2"])
def test_layouts_of_other_meshes(eight_workers, source):
    for layout, target in itertools.product(LAYOUTS[source], ["1", "3", "2x2x2"]):
        ours = gt.distribute(VALUE, mesh_of(source), layout)
        mesh = mesh_of(target).submesh(dp=0) if target == "2x2x2" else mesh_of(target)
        again = ours.redistribute(mesh, gt.ShardingSpec(mesh, [mesh.axis_names, []]))
        assert again.spec.mesh is mesh and torch.equal(again.cpu(), VALUE)


def test_redistribute_needs_only_the_argument_that_changes(eight_workers, pair_of_pairs):
    one, other = pair_of_pairs
    ours = gt.distribute(VALUE, one, "x, -")
    assert (ours.redistribute().spec, ours.redistribute(one).spec) == (gt.ShardingSpec(one, [[], []]),) * 2
    assert ours.redistribute(placements=gt.Shard(1)).spec is gt.ShardingSpec(one, [[], ["x"]])
    assert ours.redistribute(other, gt.Shard(1)).spec is gt.ShardingSpec(other, [[], ["x"]])
    assert ours.redistribute(other).spec is gt.ShardingSpec(other, [[], []])
    spec = gt.ShardingSpec(other, [["x"], []])
    assert ours.redistribute(placements=spec).spec is ours.redistribute(other, spec).spec is spec


@pytest.mark.parametrize("target", ["x, -", "-, x", "-, -"])
def test_a_redistributed_tensor_is_a_copy(eight_workers, pair_of_pairs, target):
    ours = gt.distribute(VALUE, pair_of_pairs[0], "x, -")
    copy = ours.redistribute(placements=target)
    copy += 1
    assert torch.equal(ours.cpu(), VALUE) and torch.equal(copy.cpu(), VALUE + 1)
    ours.zero_()
    assert torch.equal(copy.cpu(), VALUE + 1)
    assert (str(ours.spec), str(copy.spec)) == ("x, -", target)


def test_views_are_laid_out_by_their_value(eight_workers, pair_of_pairs):
    ours = gt.distribute(VALUE, pair_of_pairs[0], "x, -")
    for view in (lambda x: x.t(), lambda x: x[1:6:2], lambda x: x[:, 3], lambda x: x.reshape(5, 7), lambda x: x[2, 2]):
        expected = view(VALUE)
        target = ", ".join(["x", "-"][: expected.dim()])
        assert torch.equal(view(ours).redistribute(placements=target).cpu(), expected)


def test_shards_cover_the_tensor(eight_workers):
    for grid, layout in EVERYWHERE:
        ours = gt.distribute(VALUE, mesh_of(grid), layout)
        held, spec = ours.shards(), ours.spec
        seen = np.zeros(VALUE.shape, dtype=int)
        for part in held.values():
            assert VALUE[part.slice].shape == part.shape
            assert part.bytes == VALUE[part.slice].numel() * 4
            seen[part.slice] += 1
        assert tuple(held) == spec.mesh.workers
        assert (seen == spec.mesh.size // (spec.shards(0) * spec.shards(1))).all()


@pytest.fixture
def squares(eight_workers):
    return gt.mesh((2, 2), ("rows", "columns"))


LAID_OUT = ["rows, columns", "columns, -", "-, rows columns", "-, -"]


@pytest.mark.parametrize("placements", LAID_OUT)
def test_the_data_of_a_shard_is_what_its_worker_holds(squares, placements):
    value = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    x = gt.distribute(value, squares, placements)
    for mine, plain in ((x, value), (x.t(), value.t()), (x[1:, ::2], value[1:, ::2])):
        for shard in mine.shards().values():
            assert torch.equal(shard.data, plain[shard.slice]) and type(shard.data) is torch.Tensor


def test_the_data_of_a_shard_of_a_partial_tensor_is_an_addend(squares):
    x = gt.distribute(torch.ones(4), squares, "rows + columns")
    assert sum(shard.data.sum() for shard in x.shards().values()) == 4
    shard = x.shards()[0]
    x.mul_(3)
    assert shard.data.tolist() == [3, 3], "it is read each time"


def test_a_gradient_that_waits_is_read_as_addends(eight_workers):
    mesh = gt.mesh(2, ("dp",))
    x, w = [gt.ones(4, 4, mesh=mesh, placements="dp, -").requires_grad_(needs) for needs in (False, True)]
    (x @ w).sum().backward()
    addends = [shard.data for shard in w.grad.shards().values()]
    assert [addend.sum() for addend in addends] == [32, 32] and torch.equal(sum(addends), w.grad.cpu())


def test_the_data_of_a_large_shard(squares):
    x = gt.randn(1024, 1024, mesh=squares, placements="rows, columns")
    value = x.cpu()
    assert all(torch.equal(shard.data, value[shard.slice]) for shard in x.shards().values())


def test_a_shard_of_a_tensor_that_has_moved_is_refused(squares):
    x = gt.distribute(torch.ones(4), squares, "rows")
    shard = x.shards()[0]
    x.data = x.redistribute(placements="rows columns")
    assert shard.data.tolist() == [1, 1], "the old tensor, which the shard holds"
    y = gt.ones(4)
    shard = y.shards()[y.spec.mesh.workers[0]]
    y._ref.session.place(y._ref, x.spec)
    with pytest.raises(gt.LayoutError, match=r"call shards\(\) again"):
        assert shard.data.tolist()


def test_shards_follow_the_tensor(eight_workers):
    ours = gt.shard(torch.arange(10), gt.mesh((2, 2), ("dp", "tp")))
    assert [part.shape for part in ours.shards().values()] == [(3,), (2,), (3,), (2,)]
    assert [part.slice for part in ours.shards().values()][1] == (slice(3, 5),)
    assert [part.bytes for part in ours.shards().values()] == [24, 16, 24, 16]
    assert [part.shape for part in ours[1:8].shards().values()] == [(2,), (2,), (3,), (0,)]
    (alone,) = gt.to(VALUE).shards().values()
    assert (alone.slice, alone.bytes) == ((slice(0, 7), slice(0, 5)), 140)


def test_a_tensor_shows_its_layout(eight_workers):
    shown = repr(gt.distribute(VALUE[:1], gt.mesh(2, ("x",)), "-, x"))
    assert "[0., 1., 2., 3., 4.]" in shown and "mesh (x=2) as [-, x]" in shown


def test_a_full_tensor_is_a_plain_one(eight_workers):
    for layout in LAYOUTS["2x4"]:
        full = gt.distribute(VALUE, mesh_of("2x4"), layout).full_tensor()
        assert type(full) is torch.Tensor and torch.equal(full, VALUE)


PLACED = {
    "distribute": lambda x, mesh, layout: gt.distribute(x, mesh, layout),
    "redistribute": lambda x, mesh, layout: gt.to(x).redistribute(mesh, layout),
    "twice": lambda x, mesh, layout: gt.distribute(x, mesh, layout).redistribute(gt.mesh(3, "x"), gt.Shard(1)),
    "full_tensor": lambda x, mesh, layout: gt.distribute(x, mesh, layout).full_tensor(),
    "after an op": lambda x, mesh, layout: (gt.to(x) * 1).redistribute(mesh, layout),
}


@pytest.mark.parametrize("name", PLACED)
def test_gradients_pass_through_layouts(eight_workers, name):
    weight = torch.randn(7, 5)
    for grid, layout in EVERYWHERE:
        x = VALUE.clone().requires_grad_()
        placed = PLACED[name](x, mesh_of(grid), layout)
        ((placed * weight) * placed).sum().backward()
        torch.testing.assert_close(x.grad, 2 * VALUE * weight)


@pytest.mark.parametrize("place", [gt.shard, gt.replicate], ids=["shard", "replicate"])
def test_gradients_pass_through_shard_and_replicate(eight_workers, place):
    x = gt.to(VALUE).requires_grad_()
    (place(x, mesh_of("2x4")) ** 2).sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * VALUE)


def test_second_gradients_pass_through_layouts(eight_workers):
    x = gt.to(VALUE).requires_grad_()
    (first,) = torch.autograd.grad((gt.shard(x, mesh_of("2x4")) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second.cpu(), 6 * VALUE)


@pytest.mark.parametrize(
    ("value", "placements", "message"),
    [
        (torch.arange(4.0), "x[0:1 1:2]", "does not cut dim 0, which has 4 elements"),
        (torch.arange(4.0), "x[0:3 1:4]", "does not cut dim 0"),
        (torch.arange(4), gt.Partial("or"), "truth values, and this tensor is of int64"),
        (torch.arange(4.0), gt.Partial("and"), "truth values"),
    ],
)
def test_a_layout_must_fit_its_tensor(eight_workers, value, placements, message):
    with pytest.raises(gt.LayoutError, match=message):
        gt.distribute(value, gt.mesh(2, ["x"]), placements)
    whole = gt.distribute(torch.tensor([True, False, True]), gt.mesh(2, ["x"]), gt.Partial("or"))
    assert whole.tolist() == [True, False, True]
    assert gt.distribute(torch.arange(4.0), gt.mesh(2, ["x"]), "x[1:4 0:1]").tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_rows_whose_shards_have_one_element(eight_workers, reduce):
    """Torch has no product of such rows in a narrow dtype."""
    x, source, index = torch.rand(5, 8).bfloat16(), torch.rand(4, 8).bfloat16(), torch.tensor([4, 0, 4, 1])
    ours = gt.distribute(x, gt.mesh(8, ("x",)), "-, x").index_reduce(0, gt.to(index), gt.to(source), reduce)
    torch.testing.assert_close(ours.cpu(), x.index_reduce(0, index, source, reduce))
