"""Plans are carried out with NumPy, message by message, and compared with the layouts and the bytes promised."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.sharding.boxes import balanced_cuts, box_elements
from gt.sharding.cost import GLOO, LinkSpeed, lower_bound, memory_bytes, reshard_bytes, seconds
from gt.sharding.factors import HaloWindow
from gt.sharding.hop_traffic import received
from gt.sharding.reshard import contributions, explain, plan_reshard, pulls, pushes, segments
from gt.sharding.routes import cheapest_route, worker_boxes
from gt.sharding.spec import REDUCTIONS, DeviceMesh, ShardingSpec, compute_local_shape, local_box, whole
from gt.sharding.spec_text import parse_spec

REDUCE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
IDENTITY = {"sum": 0, "prod": 1, "max": np.iinfo(np.int64).min, "min": np.iinfo(np.int64).max, "and": -1, "or": 0}
ITEMSIZE = 8


@pytest.fixture(autouse=True)
def small_caches():
    """Thousands of plans are made here; each later test would walk them in its garbage collection."""
    yield
    for cached in (pulls, pushes, contributions, plan_reshard, cheapest_route, worker_boxes):
        cached.cache_clear()


# --- Workers in NumPy -------------------------------------------------------------------------------------------------


def slices(box, inside):
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, inside, strict=True))


def draw_parts(spec, shape, seed=0):
    """What the workers hold, and the value that it stands for."""
    random = np.random.default_rng(seed)
    count = math.prod(spec.mesh.axis_size(axis) for axis in spec.partial)
    addends = random.integers(-4, 5, (count, *shape))
    first = {spec.mesh.axis_group(worker, spec.partial) for worker in spec.mesh.workers}
    parts = {
        worker: addends[number][slices(local_box(spec, shape, worker), [(0, 0)] * len(shape))].copy()
        for axis_group in first
        for number, worker in enumerate(axis_group)
    }
    return parts, REDUCE[spec.kind].reduce(addends, axis=0)


class Network:
    """Messages between workers, and the elements that each pair of them exchanged."""

    def __init__(self):
        self.messages = {}
        self.elements = Counter()

    def send(self, source, target, data):
        assert source != target and (source, target) not in self.messages
        self.messages[source, target] = data.copy()
        self.elements[source, target] += data.size

    def receive(self, source, target):
        return self.messages.pop((source, target))


def run(plan, shape, parts):
    network = Network()
    for step in plan.steps:
        act = all_reduce if step.kind == "all-reduce" else exchange
        parts = act(step, shape, parts, network)
        assert not network.messages
    return parts, network.elements


def exchange(step, shape, parts, network):
    for worker in step.source.mesh.workers:
        for peer, box in pushes(step, shape, worker):
            assert box_elements(box) > 0
            network.send(worker, peer, parts[worker][slices(box, local_box(step.source, shape, worker))])
    return {worker: assemble(step, shape, worker, parts, network) for worker in step.target.mesh.workers}


def assemble(step, shape, worker, parts, network):
    whole_box = local_box(step.target, shape, worker)
    reduces = step.kind in ("reduce", "reduce-scatter")
    filling = IDENTITY[step.target.kind] if step.kind == "to-partial" else -99  # an element that nothing was put in
    part = np.full(compute_local_shape(step.target, shape, worker), filling)
    for number, addend in enumerate(contributions(step, shape, worker) if reduces else [pulls(step, shape, worker)]):
        for peer, box in addend:
            own = peer == worker
            data = (
                parts[peer][slices(box, local_box(step.source, shape, peer))] if own else network.receive(peer, worker)
            )
            position = slices(box, whole_box)
            part[position] = REDUCE[step.source.kind](part[position], data) if number else data
    return part


def all_reduce(step, shape, parts, network):
    flat = {worker: part.ravel() for worker, part in parts.items()}
    plans = {worker: segments(step, shape, worker) for worker in parts}
    for worker, (peers, cuts) in plans.items():
        for peer, (start, stop) in zip(peers, cuts, strict=True):
            if peer != worker:
                network.send(worker, peer, flat[worker][start:stop])
    reduced = {}
    for worker, (peers, cuts) in plans.items():
        start, stop = cuts[peers.index(worker)]
        addends = [flat[worker][start:stop] if peer == worker else network.receive(peer, worker) for peer in peers]
        reduced[worker] = REDUCE[step.source.kind].reduce(addends, axis=0)
    for worker, (peers, _) in plans.items():
        for peer in peers:
            if peer != worker:
                network.send(worker, peer, reduced[worker])
    return {
        worker: np.concatenate(
            [reduced[worker] if peer == worker else network.receive(peer, worker) for peer in peers]
        ).reshape(parts[worker].shape)
        for worker, (peers, _) in plans.items()
    }


def check_holds(spec, shape, parts, value):
    """The partial values of each group make up the value, and replicas are equal."""
    seen = {}
    for worker in spec.mesh.workers:
        box = local_box(spec, shape, worker)
        assert parts[worker].shape == compute_local_shape(spec, shape, worker)
        group = [parts[peer] for peer in spec.mesh.axis_group(worker, spec.partial)]
        assert np.array_equal(REDUCE[spec.kind].reduce(group), value[slices(box, [(0, 0)] * len(shape))])
        addend = spec.mesh.axis_group(worker, spec.partial).index(worker)
        assert np.array_equal(seen.setdefault((box, addend), parts[worker]), parts[worker])


def check(shape, source, target, seed=0):
    """Carry out a plan; the plan."""
    plan = plan_reshard(shape, ITEMSIZE, source, target)
    parts, value = draw_parts(source, shape, seed)
    parts, elements = run(plan, shape, parts)
    check_holds(target, shape, parts, value)
    assert ITEMSIZE * elements.total() == plan.bytes == reshard_bytes(shape, ITEMSIZE, source, target)
    arrived = Counter()
    for (_, worker), count in elements.items():
        arrived[worker] += count
    promised = Counter()
    for step in plan.steps:
        promised.update(
            dict(zip(step.target.mesh.workers, received(shape, step.source, step.target).tolist(), strict=True))
        )
    assert arrived == promised
    bound = lower_bound(shape, ITEMSIZE, source, target)
    assert plan.bytes >= bound
    if not source.partial and not target.partial:
        assert plan.bytes == bound and len(plan.steps) <= 1
    return plan


# --- All pairs --------------------------------------------------------------------------------------------------------


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


def mesh_of(*shape, workers=()):
    return DeviceMesh(shape, "xyz"[: len(shape)], workers)


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


# --- Other meshes, cuts and windows -----------------------------------------------------------------------------------

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


def test_windows_in_which_no_worker_keeps_what_it_had():
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
def test_any_change(change, seed):
    check(*change, seed=seed)


def test_two_hundred_workers():
    mesh = mesh_of(10, 20)
    for source, target in [("x, y", "y, x"), ("x, - + y", "y, -"), ("-, - + x y", "-, -"), ("x y, -", "-, - + y")]:
        check((37, 53), parse_spec(source, mesh), parse_spec(target, mesh))


# --- Bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 4, 7])
def test_bytes_of_the_collectives(p):
    """The table of section 2 of the notes on matmul; X is the tensor."""
    mesh, one = mesh_of(p), mesh_of(1, workers=(0,))
    shape = (4 * p, 3 * p)
    x = math.prod(shape) * ITEMSIZE
    rows, cols, full, part = [parse_spec(text, mesh) for text in ("x, -", "-, x", "-, -", "-, - + x")]
    holder = whole(one, 2)
    expected = {
        ("slice", full, rows): 0,
        ("to-partial", full, part): 0,
        ("to-partial", rows, part): 0,
        ("all-gather", rows, full): (p - 1) * x,
        ("all-to-all", rows, cols): x * (p - 1) // p,
        ("reduce-scatter", part, rows): (p - 1) * x,
        ("all-reduce", part, full): 2 * (p - 1) * x,
        ("broadcast", holder, full): (p - 1) * x,
        ("scatter", holder, rows): x * (p - 1) // p,
        ("gather", rows, holder): x * (p - 1) // p,
        ("reduce", part, holder): (p - 1) * x,
    }
    for (kind, source, target), nbytes in expected.items():
        plan = check(shape, source, target)
        assert ([step.kind for step in plan.steps], plan.bytes) == ([kind], nbytes)


@pytest.mark.parametrize(
    ("source", "target", "times"),
    [
        ("-, - + x y", "x, y", 7),  # all partial axes are reduced together
        ("-, - + x y", "-, -", 14),
        ("x, - + y", "x, y", 3),
        ("x, - + y", "x y, -", 3),
        ("x, - + y", "x, -", 6),
        ("-, x + y", "-, x", 6),
        ("-, x + y", "x, y", 3.5),  # a reduction into a layout of which half is there
        ("-, - + y", "x, y", 3),  # what is needed only
        ("-, - + y", "x, -", 6),
        ("-, - + y", "-, -", 10),  # reduced once, not once for each copy: 3, then 7
        ("x, - + y", "-, -", 10),
        ("-, - + x y", "-, - + x", 12),  # the other axis only
        ("-, - + x y", "y, - + x", 6),
        ("x, - + y", "-, x + y", 2),  # four addends, half of each moves
        ("y, - + x", "-, - + x", 4),  # 1 to reduce, 3 to gather; all gathered partial would be 6
        ("-, - + x", "-, - + y", 2),
        ("x y, -", "-, x y", 0.875),
        ("x y, -", "x, -", 3),
        ("x, y", "x, -", 3),
    ],
)
def test_bytes_on_two_axes(source, target, times):
    mesh = mesh_of(2, 4)
    shape = (64, 32)
    assert check(shape, parse_spec(source, mesh), parse_spec(target, mesh)).bytes == times * math.prod(shape) * ITEMSIZE


def test_owners_are_chosen_where_the_rest_moves_least():
    """On the way to copies each element has one owner: one of the target's, or one that has an addend."""
    small, flat, cube = mesh_of(3, workers=(6, 7, 8)), mesh_of(4, 2), mesh_of(2, 3, 4)
    expected = [
        (flat, "-, - + y", small, "-, -", 3 + 1 / 3),  # two of the three hold an addend: 4/3 to reduce, 2 to copy
        (cube, "x y, - + z", cube, "-, z x", 5 + 1 / 2),  # reduced as it was cut
        (cube, "y x, - + z", cube, "-, - + x y", 6),  # made partial as it was cut
    ]
    for mesh, source, other, target, times in expected:
        plan = check((24, 24), parse_spec(source, mesh), parse_spec(target, other))
        assert plan.bytes == pytest.approx(times * 24 * 24 * ITEMSIZE)


def test_a_number_goes_through_one_worker_to_another_mesh():
    plan = check((), parse_spec("+ y", mesh_of(2, 4)), whole(mesh_of(2, 2, workers=(10, 11, 12, 13)), 0))
    assert ([step.kind for step in plan.steps], plan.bytes) == (["reduce", "broadcast"], (4 + 3) * ITEMSIZE)


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_partial_values_of_another_kind_are_resolved_first(kind):
    mesh = mesh_of(4)
    plan = check((8,), parse_spec("- + x:prod", mesh), parse_spec(f"- + x:{kind}", mesh))
    assert [step.kind for step in plan.steps] == ["reduce-scatter", "to-partial"]


@pytest.mark.parametrize(
    ("source", "target", "most"),
    [
        ("x, -", "-, x", 0.25),
        ("x y, -", "y x, -", 0.125),
        ("x, y", "y, x", 0.125),
        ("x, -", "x y, -", 0),
        ("x, -", "y x, -", 0.125),
        ("x y, -", "x, -", 0.375),
        ("x y, -", "y, -", 0.25),
        ("x, y", "-, x y", 0.125),
        ("x, y", "-, y x", 0.0625),
        ("x y, -", "-, x y", 0.109375),
        ("x y, -", "x, y", 0.09375),
        ("x y, -", "y, x", 0.125),
        ("x, -", "y, -", 0.25),
    ],
)
def test_the_most_that_one_worker_receives(source, target, most):
    """The table of section 4.2 of the notes on sharding."""
    mesh, shape = mesh_of(2, 4), (64, 64)
    (step,) = check(shape, parse_spec(source, mesh), parse_spec(target, mesh)).steps
    assert received(shape, step.source, step.target).max() == most * 64 * 64


def test_copies_share_the_load():
    """Four holders of everything serve eight newcomers: two each."""
    source, target = whole(mesh_of(4), 1), parse_spec("x", mesh_of(8, workers=range(4, 12)))
    (step,) = plan_reshard((16,), 4, source, target).steps
    assert [len(pushes(step, (16,), worker)) for worker in range(4)] == [2, 2, 2, 2]


def test_a_worker_is_served_by_its_own_copy():
    mesh = mesh_of(2, 4)
    (step,) = plan_reshard((8,), 4, parse_spec("y", mesh), whole(mesh, 1)).steps
    assert {pull.peer for pull in pulls(step, (8,), 6)} == {4, 5, 6, 7}


def test_addends_come_in_the_order_of_the_mesh():
    mesh = mesh_of(2, 2, workers=(3, 1, 2, 0))
    (step,) = plan_reshard((8,), 4, parse_spec("- + x y", mesh), parse_spec("y x", mesh)).steps
    assert [[pull.peer for pull in addend] for addend in contributions(step, (8,), 2)] == [[3], [1], [2], [0]]


def test_workers_outside_have_nothing_to_do():
    (step,) = plan_reshard((8,), 4, whole(mesh_of(2), 1), parse_spec("x", mesh_of(2, workers=(4, 5)))).steps
    assert pulls(step, (8,), 0) == pushes(step, (8,), 4) == pulls(step, (8,), 9) == pushes(step, (8,), 9) == ()


# --- Words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("x, -", "x, -", []),
        ("x, -", "x y, -", ["slice along y"]),
        ("x y, -", "x, -", ["all-gather along y"]),
        ("x y, -", "y x, -", ["permute along x y"]),
        ("x, -", "-, x", ["all-to-all along x"]),
        ("x, -", "x[0:7 7:8], -", ["send along x"]),
        ("-, - + x", "x, y", ["reduce-scatter along x"]),
        ("y, - + x", "y, -", ["all-reduce along x"]),
        ("-, - + y", "x, -", ["slice along x", "all-reduce along y"]),
        ("y, - + x", "-, -", ["reduce-scatter along x", "all-gather along x y"]),
        ("y, -", "-, - + y", ["to-partial along y"]),
        ("x, -", "-, - + x y", ["to-partial along x y"]),
        ("x, -", "-, - + y", ["all-to-all along x y", "to-partial along y"]),
    ],
)
def test_steps_have_names(source, target, steps):
    mesh = mesh_of(2, 4)
    plan = plan_reshard((8, 8), 4, parse_spec(source, mesh), parse_spec(target, mesh))
    assert [str(step).partition(":")[0] for step in plan.steps] == steps


def test_steps_between_meshes_have_names():
    one, two, other = mesh_of(1, workers=(0,)), mesh_of(2), mesh_of(2, workers=(4, 5))
    turned, small = mesh_of(2, workers=(1, 0)), mesh_of(1, workers=(1,))
    cut = {mesh: parse_spec("x", mesh) for mesh in (two, other, turned)}
    expected = {
        (whole(one, 1), whole(two, 1)): "broadcast",
        (whole(two, 1), whole(one, 1)): None,
        (whole(one, 1), whole(small, 1)): "send",
        (whole(two, 1), cut[other]): "scatter",
        (whole(two, 1), cut[turned]): "slice",
        (cut[two], cut[turned]): "permute",
        (cut[two], cut[other]): "send",
        (cut[two], whole(one, 1)): "gather",
    }
    for (source, target), kind in expected.items():
        assert [step.kind for step in check((8,), source, target).steps] == ([kind] if kind else [])


def test_a_plan_explains_itself():
    mesh = mesh_of(2, 4)
    plan = plan_reshard((64, 32), 4, parse_spec("y, - + x", mesh), parse_spec("-, -", mesh))
    assert explain(plan).splitlines() == [
        "          8,192 B  reduce-scatter along x: [y, - + x] on (x=2, y=4) -> [y, x] on (x=2, y=4)",
        "         57,344 B  all-gather along x y: [y, x] on (x=2, y=4) -> [-, -] on (x=2, y=4)",
    ]
    assert explain(plan_reshard((64, 32), 4, whole(mesh, 2), whole(mesh, 2))) == "nothing to do"


# --- Time and memory --------------------------------------------------------------------------------------------------


def test_seconds_are_messages_and_bytes():
    link = LinkSpeed(alpha=1.0, beta=0.01)
    assert seconds("all-gather", 100, 4, link) == 3 + 1
    assert seconds("all-reduce", 100, 4, link) == 6 + 1
    assert seconds("permute", 100, 4, link) == 1 + 1
    assert seconds("slice", 0, 4, link) == seconds("all-reduce", 0, 1, link) == 0
    assert seconds("all-reduce", 4096, 2, GLOO) == pytest.approx(1.07e-3, rel=0.01)


def test_memory_is_that_of_the_largest_part():
    mesh = mesh_of(2, 4)
    assert memory_bytes(parse_spec("x, y", mesh), (7, 5), 4) == 4 * 2 * 4
    assert memory_bytes(parse_spec("x[0:1 1:7], -", mesh), (7, 5), 4) == 6 * 5 * 4
    assert memory_bytes(parse_spec("+ x y", mesh), (), 8) == 8
