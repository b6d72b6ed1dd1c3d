"""The bytes, the names and the order of the steps of plans."""

import math

import pytest

from gt.sharding.hop_traffic import received
from gt.sharding.reshard import contributions, explain, plan_reshard, pulls, pushes
from gt.sharding.spec import whole
from gt.sharding.spec_text import parse_spec
from tests.sharding.numpy_workers import ITEMSIZE, check, mesh_of


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
        ("-, - + x y", "-, - + x", 10),  # 7 to reduce all, 3 to gather halves; the other axis only would be 12
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


def test_replicas_serve_equally_many_workers():
    """Four holders of everything serve eight newcomers: two each."""
    source, target = whole(mesh_of(4), 1), parse_spec("x", mesh_of(8, workers=range(4, 12)))
    (step,) = plan_reshard((16,), 4, source, target).steps
    assert [len(pushes(step, (16,), worker)) for worker in range(4)] == [2, 2, 2, 2]


def test_a_worker_pulls_from_the_replica_that_it_belongs_to():
    mesh = mesh_of(2, 4)
    (step,) = plan_reshard((8,), 4, parse_spec("y", mesh), whole(mesh, 1)).steps
    assert {pull.peer for pull in pulls(step, (8,), 6)} == {4, 5, 6, 7}


def test_addends_are_in_the_order_of_the_mesh():
    mesh = mesh_of(2, 2, workers=(3, 1, 2, 0))
    (step,) = plan_reshard((8,), 4, parse_spec("- + x y", mesh), parse_spec("y x", mesh)).steps
    assert [[pull.peer for pull in addend] for addend in contributions(step, (8,), 2)] == [[3], [1], [2], [0]]


def test_workers_outside_of_a_mesh_exchange_nothing():
    (step,) = plan_reshard((8,), 4, whole(mesh_of(2), 1), parse_spec("x", mesh_of(2, workers=(4, 5)))).steps
    assert pulls(step, (8,), 0) == pushes(step, (8,), 4) == pulls(step, (8,), 9) == pushes(step, (8,), 9) == ()


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
