"""Every change of layout, carried out with NumPy message by message."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.sharding.boxes import balanced_cuts
from gt.sharding.factors import HaloWindow
from gt.sharding.reshard import contributions, plan_reshard, pulls, pushes
from gt.sharding.routes import cheapest_route, worker_boxes
from gt.sharding.spec import REDUCTIONS, DeviceMesh, ShardingSpec
from gt.sharding.spec_text import parse_spec
from tests.sharding.numpy_workers import ITEMSIZE, check, mesh_of


@pytest.fixture(autouse=True)
def small_caches():
    """Thousands of plans are made here; each later test would walk them in its garbage collection."""
    yield
    for cached in (pulls, pushes, contributions, plan_reshard, cheapest_route, worker_boxes):
        cached.cache_clear()


def all_specs(mesh, rank=2, kind="sum"):
    """Every use of every axis, in every order where several cut one dim."""
    uses = itertools.product([None, "partial", *range(rank)], repeat=len(mesh.shape))
    for use in uses:
        used = dict(zip(mesh.axis_names, use, strict=True))
        partial = [axis for axis in used if used[axis] == "partial"]
        cutting = [[axis for axis in used if used[axis] == dim] for dim in range(rank)]
        for dims in itertools.product(*map(itertools.permutations, cutting)):
            yield ShardingSpec(mesh, dims, partial, kind)


def all_pairs(mesh, rank=2):
    return itertools.product(all_specs(mesh, rank), repeat=2)


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (2, 4), (3, 5)])
@pytest.mark.parametrize("shape", [(8, 16), (7, 5)])
def test_every_change_of_layout_on_a_mesh(mesh, shape):
    for source, target in all_pairs(mesh_of(*mesh)):
        check(shape, source, target)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 16), (7, 5)])
def test_every_change_of_layout_on_a_cube(shape):
    """A part of them is tried by the next test each time."""
    test_every_change_of_layout_on_a_mesh((2, 2, 2), shape)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (3, 5), (4, 1, 2)])
@pytest.mark.parametrize("shape", [(8, 16), (7, 5), (3, 2), (1, 10), (0, 4)])
def test_changes_of_layout_on_larger_meshes(mesh, shape):
    pairs = list(all_pairs(mesh_of(*mesh)))
    for at in np.random.default_rng(0).integers(len(pairs), size=60):
        check(shape, *pairs[at])


@pytest.mark.parametrize("mesh", [(4,), (2, 4)])
@pytest.mark.parametrize("shape", [(), (6,), (3, 2, 5)])
def test_other_ranks(mesh, shape):
    pairs = list(all_pairs(mesh_of(*mesh), len(shape)))
    for at in np.random.default_rng(0).integers(len(pairs), size=80):
        check(shape, *pairs[at])


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_every_kind_of_partial_value(kind):
    mesh = mesh_of(2, 2)
    wanted = ["-", "x", "y x", *[f"{text}:{other}" for text in ("- + x", "- + y", "y + x") for other in REDUCTIONS]]
    for source, target in itertools.product(["- + x", "- + x y", "y + x"], wanted):
        check((5,), parse_spec(f"{source}:{kind}", mesh), parse_spec(target, mesh))


def test_values_become_partial_without_a_byte():
    mesh = mesh_of(2, 4)
    pairs = [("-, -", "-, - + x"), ("x, -", "-, - + x"), ("x y, -", "x, - + y"), ("-, -", "y, - + x")]
    for (source, target), kind in itertools.product(pairs, REDUCTIONS):
        assert check((6, 5), parse_spec(source, mesh), parse_spec(f"{target}:{kind}", mesh)).bytes == 0


def test_replicas_are_partial_values_of_a_maximum_as_they_are():
    mesh = mesh_of(2, 4)
    assert plan_reshard((6,), 4, parse_spec("x", mesh), parse_spec("x + y:max", mesh)).steps == ()
    assert len(plan_reshard((6,), 4, parse_spec("x", mesh), parse_spec("x + y", mesh)).steps) == 1
    for kind, keep in [("max", 8), ("sum", 2)]:
        (step,) = plan_reshard((6,), 4, parse_spec("-", mesh), parse_spec(f"x + y:{kind}", mesh)).steps
        assert sum(pulls(step, (6,), worker) != () for worker in mesh.workers) == keep


MESHES = [
    mesh_of(2, 4),
    mesh_of(2, 4, workers=(7, 2, 5, 0, 1, 3, 6, 4)),  # the same workers in another order
    mesh_of(4, 2),
    mesh_of(8),
    mesh_of(3, workers=(6, 7, 8)),  # overlapping
    mesh_of(2, 2, workers=(10, 11, 12, 13)),  # disjoint
    mesh_of(1, workers=(3,)),
]


@pytest.mark.parametrize("shape", [(8, 16), (7, 5), ()])
def test_changes_between_meshes(shape):
    random = np.random.default_rng(0)
    for one, other in itertools.permutations(MESHES, 2):
        sources, targets = [list(all_specs(mesh, len(shape))) for mesh in (one, other)]
        for _ in range(4):
            check(shape, sources[random.integers(len(sources))], targets[random.integers(len(targets))])


def test_a_mesh_by_other_names_is_the_same():
    one, other = mesh_of(2, 4), DeviceMesh((2, 1, 4), ("dp", "pp", "tp"), name="train")
    assert plan_reshard((7, 5), 4, parse_spec("x, - + y", one), parse_spec("dp pp, - + tp", other)).steps == ()


@pytest.mark.parametrize(
    "text", ["x[0:5 5:6], -", "-, x[0:0 0:5]", "x[0:1 1:6], y[0:0 0:5 5:5 5:5]", "y x, - ", "- , - + y"]
)
def test_ragged_cuts(text):
    mesh = mesh_of(2, 4)
    for target in ["x, -", "-, -", "y, x", "x[0:2 2:6], -", "-, - + x", "x[0:5 5:6], y", "x[0:5 5:6], - + y"]:
        check((6, 5), parse_spec(text, mesh), parse_spec(target, mesh))
        check((6, 5), parse_spec(target, mesh), parse_spec(text, mesh))


@pytest.mark.parametrize(
    "reach", [HaloWindow(1, 1, 1, 12), HaloWindow(2, 1, 1, 12), HaloWindow(4, 0, 1, 12), HaloWindow(1, 3, 0, 12)]
)
def test_windows(reach):
    mesh = mesh_of(2, 3)
    for axes in ("x", "y", "x y"):
        count = math.prod(mesh.axis_size(axis) for axis in axes.split())
        cuts = reach.cuts(balanced_cuts(12 // reach.stride, (count,)))
        windows = ShardingSpec(mesh, (axes.split(), ()), cuts=(cuts, None))
        for text in ["x, -", "-, x", "-, -", "y x, -", "-, - + x", "x, - + y", "y, - + x", "-, - + x y"]:
            source = parse_spec(text, mesh)
            check((12, 2), source, windows)
            for axis in {"x", "y"} - {*axes.split()}:
                check((12, 2), source, windows.replace(partial=[axis]))


def test_windows_in_which_no_worker_keeps_its_elements():
    check((4,), parse_spec("x + y", mesh_of(2, 2)), parse_spec("x[2:4 0:3]", mesh_of(2, 2)))


def test_a_window_of_one_worker_is_not_the_whole():
    for mesh, text in [(mesh_of(1), "x[1:3]"), (mesh_of(2, 1), "y[0:2]"), (mesh_of(2, 1), "y[1:2] + x")]:
        for source in ["-", "- + x"]:
            check((4,), parse_spec(source, mesh), parse_spec(text, mesh))


def test_a_halo_costs_its_elements():
    mesh = mesh_of(4)
    windows = ShardingSpec(mesh, (("x",),), cuts=(HaloWindow(1, 1, 1, 16).cuts(balanced_cuts(16, (4,))),))
    plan = check((16,), parse_spec("x", mesh), windows)
    assert plan.bytes == 6 * ITEMSIZE and [step.kind for step in plan.steps] == ["send"]
    assert check((16,), parse_spec("- + x", mesh), windows).bytes == (3 * 16 + 6) * ITEMSIZE


@st.composite
def meshes(draw):
    shape = draw(st.lists(st.integers(1, 4), max_size=3).filter(lambda shape: math.prod(shape) <= 12))
    workers = draw(st.permutations(range(14)))[: math.prod(shape)]
    return mesh_of(*shape, workers=workers)


@st.composite
def specs(draw, mesh, shape, windows=False):
    dims, partial = [[] for _ in shape], []
    for axis in draw(st.permutations(mesh.axis_names)):
        use = draw(st.integers(-2, len(shape) - 1))
        if use > -2:
            (partial if use == -1 else dims[use]).append(axis)
    cuts = [
        draw(intervals(math.prod(map(mesh.axis_size, axes)), size, windows))
        for axes, size in zip(dims, shape, strict=True)
    ]
    return ShardingSpec(mesh, dims, partial, draw(st.sampled_from(REDUCTIONS)), cuts)


@st.composite
def intervals(draw, count, size, windows):
    """Ragged, empty, in any order; overlapping or with gaps if they are windows."""
    if draw(st.booleans()):
        return None
    edges = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
    cuts = draw(st.permutations(list(itertools.pairwise([0, *edges, size]))))
    if windows and draw(st.booleans()):
        cuts = [
            (max(start - draw(st.integers(0, 2)), 0), max(start, stop - draw(st.integers(-2, 1))))
            for start, stop in cuts
        ]
    return tuple((start, min(stop, size)) for start, stop in cuts)


@st.composite
def changes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    mesh = draw(meshes())
    other = draw(st.one_of(st.just(mesh), meshes()))
    return shape, draw(specs(mesh, shape)), draw(specs(other, shape, windows=True))


@settings(max_examples=400, deadline=None)
@given(changes(), st.integers(0, 9))
def test_random_changes_of_layout(change, seed):
    check(*change, seed=seed)


def test_two_hundred_workers():
    mesh = mesh_of(10, 20)
    for source, target in [("x, y", "y, x"), ("x, - + y", "y, -"), ("-, - + x y", "-, -"), ("x y, -", "-, - + y")]:
        check((37, 53), parse_spec(source, mesh), parse_spec(target, mesh))


# Several hosts

REDUCED = [
    ("-, - + dp tp", "-, -", ["reduce-scatter tp", "all-reduce dp", "all-gather tp"]),
    ("-, - + dp", "-, -", ["slice tp", "all-reduce dp", "all-gather tp"]),
    ("-, - + tp", "-, -", ["all-reduce tp"]),
    ("tp, - + dp", "tp, -", ["all-reduce dp"]),
]


@pytest.mark.parametrize(("source", "target", "steps"), REDUCED)
def test_workers_of_a_host_divide_a_reduction_between_hosts(source, target, steps):
    mesh = DeviceMesh((2, 2), ("dp", "tp"), hosts="aabb")
    plan = plan_reshard((128, 256), ITEMSIZE, parse_spec(source, mesh), parse_spec(target, mesh))
    assert [f"{step.kind} {' '.join(step.axes)}" for step in plan.steps] == steps
    one = DeviceMesh((2, 2), ("dp", "tp"))
    alone = plan_reshard((128, 256), ITEMSIZE, parse_spec(source, one), parse_spec(target, one))
    assert plan.bytes == alone.bytes and len(alone.steps) == 1


def test_a_small_reduction_between_hosts_is_one_step():
    mesh = DeviceMesh((2, 2), ("dp", "tp"), hosts="aabb")
    assert len(plan_reshard((16,), ITEMSIZE, parse_spec("- + dp tp", mesh), parse_spec("-", mesh)).steps) == 1


@pytest.mark.parametrize(
    ("mesh", "hosts"), [((2, 2), "aabb"), ((2, 4), "aaaabbbb"), ((2, 3), "aaabbc"), ((4,), "aabb")]
)
@pytest.mark.parametrize("shape", [(128, 256), (7, 2341), (1, 1 << 14)])
def test_reductions_between_hosts(mesh, hosts, shape):
    grid = DeviceMesh(mesh, "xy"[: len(mesh)], hosts=hosts)
    pairs = [(source, target) for source, target in all_pairs(grid) if source.partial and not target.partial]
    for at in np.random.default_rng(0).integers(len(pairs), size=20):
        check(shape, *pairs[at])
