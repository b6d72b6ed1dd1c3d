"""The time of exchanges within hosts and between them."""

import pytest

from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Input
from gt.sharding import strategy_choice
from gt.sharding.calibration import Calibration, read_calibration, step_seconds, transfer_seconds
from gt.sharding.host_order import default_mesh, host_share
from gt.sharding.lowering import all_strategies, forget_choices, infer_output_sharding
from gt.sharding.op_calls import OpCall
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec

HOSTS = dict(enumerate("abababab"))
GRID = default_mesh((2, 4), ("dp", "tp"), HOSTS)  # tp within a host
ROW = default_mesh((8,), ("w",), HOSTS)
MACHINE = Calibration(message_seconds=1.0, link_bandwidth=100.0, host_message_seconds=10.0, host_bandwidth=50.0)


def test_within_a_host_nothing_depends_on_the_links_between_hosts():
    one = DeviceMesh((2, 4), ("dp", "tp"))
    for kind in ("all-gather", "all-reduce", "all-to-all"):
        assert step_seconds(kind, ("tp",), 800, GRID, MACHINE) == step_seconds(kind, ("tp",), 800, one, MACHINE)
        assert host_share(kind, ("tp",), GRID) == host_share(kind, ("dp",), one) == 0
    assert step_seconds("all-gather", ("tp",), 800, GRID, MACHINE) == 3 * 1.0 + 100 / 100.0


def test_between_hosts_all_workers_of_a_host_share_its_link():
    # a worker receives 100 bytes, and its host 400, in one message
    assert step_seconds("all-gather", ("dp",), 800, GRID, MACHINE) == 10.0 + 400 / 50.0
    assert transfer_seconds("all-gather", ("dp",), 800, GRID, MACHINE) == 400 / 50.0
    assert step_seconds("all-gather", ("dp",), 0, GRID, MACHINE) == 0


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("all-reduce", 2 / 8),  # of the eight links of a ring, two are between hosts
        ("all-gather", 2 / 8),
        ("all-to-all", 4 / 7),  # four of the seven others are on the other host
        ("reduce-scatter", 4 / 7),
    ],
)
def test_a_part_of_the_bytes_of_a_row_travels_between_hosts(kind, share):
    assert host_share(kind, ("w",), ROW) == host_share(kind, ("dp", "tp"), GRID) == pytest.approx(share)
    assert host_share(kind, (), ROW) == pytest.approx(share)  # between meshes
    expected = 100 * ((1 - share) / 100 + share * 4 / 50)
    assert transfer_seconds(kind, ("w",), 800, ROW, MACHINE) == pytest.approx(expected)


def test_speeds_of_an_axis_that_the_user_has_given_are_kept():
    machine = Calibration(axes={"dp": (3.0, 10.0)}, host_bandwidth=1.0)
    assert step_seconds("all-gather", ("dp",), 800, GRID, machine) == pytest.approx(3.0 + 100 / 10)


def test_a_calibration_of_before_is_read_and_has_the_stated_links_between_hosts(tmp_path):
    file = tmp_path / "calibration.json"
    file.write_text('{"flops": 1e12, "message_seconds": 1e-5, "link_bandwidth": 1e10, "axes": {}, "overlap": 0.5}')
    found = read_calibration(file)
    assert (found.flops, found.overlap) == (1e12, 0.5)
    assert (found.host_message_seconds, found.host_bandwidth) == (200e-6, 1.25e9)
    assert "between hosts" not in str(found)
    assert "between hosts 0.05 GB/s, 200 us a message" in str(Calibration(host_bandwidth=5e7))
    assert "between hosts 1.25 GB/s" in found.describe(has_hosts=True)


# The choice for one op


def meta(*shape):
    return TensorMeta(shape, contiguous_strides(shape), 0, "float32")


def chosen(mesh, left, right, sizes):
    m, k, n = sizes
    call = OpCall("aten.mm.default", (Input(0), Input(1)), {}, (meta(m, k), meta(k, n)), (meta(m, n),))
    specs = [parse_spec(text, mesh) for text in (left, right)]
    forget_choices()
    strategy = infer_output_sharding(call, specs, mesh).strategy
    assert all_strategies(call, specs, mesh).choices[0].choice.strategy == strategy
    return " @ ".join(map(str, strategy.operands)) + f" = {strategy.results[0]}"


@pytest.mark.parametrize(
    ("hosts", "taken"),
    [
        ((), "x, y @ y, - = x, - + y"),
        ("aabb", "x, y @ y, - = x, - + y"),  # y is within hosts
        ("abab", "y, x @ x, - = y, - + x"),
    ],
)
def test_of_equal_bytes_those_within_a_host_are_moved(hosts, taken):
    assert chosen(DeviceMesh((2, 2), ("x", "y"), hosts=hosts), "x, y", "x y, -", (64, 64, 64)) == taken


@pytest.mark.parametrize(("hosts", "taken"), [("aabb", "x, y @ y, - = x, - + y"), ("abab", "y, x @ x, - = y, - + x")])
def test_by_cost_the_slower_link_counts(hosts, taken, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GT_STRATEGY", "cost")
    strategy_choice._machine.cache_clear()
    try:
        assert chosen(DeviceMesh((2, 2), ("x", "y"), hosts=hosts), "x, y", "x, -", (64, 64, 64)) == taken
    finally:
        monkeypatch.undo()
        strategy_choice._machine.cache_clear()
        forget_choices()
