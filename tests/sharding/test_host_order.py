"""Meshes of workers on several hosts: the workers of one host are next to each other along the last axes."""

import logging
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.errors import LayoutError
from gt.sharding.host_order import HostSpread, default_mesh, mesh_of_workers, order_workers, widest_spread
from gt.sharding.spec import DeviceMesh, mesh_of


def hosts_named(text):
    return dict(enumerate(text))


@pytest.mark.parametrize(
    ("shape", "hosts", "ordered"),
    [
        ((2, 2), "aaaa", (0, 1, 2, 3)),
        ((2, 2), "abab", (0, 2, 1, 3)),
        ((4,), "abab", (0, 2, 1, 3)),
        ((2, 4), "abababab", (0, 2, 4, 6, 1, 3, 5, 7)),
        ((4, 2), "abababab", (0, 2, 4, 6, 1, 3, 5, 7)),
        ((2, 2), "aabbbb", (2, 3, 4, 5)),  # one host has all that are needed
        ((2,), "abb", (1, 2)),
        ((2, 4), "aaabbbbb", (3, 4, 5, 6, 0, 1, 2, 7)),  # 3 and 5: one row within a host, one that is left
        ((2, 2, 2), "aabbbbbb", (2, 3, 4, 5, 0, 1, 6, 7)),
        ((2, 4), "abcdabcd", (0, 4, 1, 5, 2, 6, 3, 7)),  # four hosts of two: pairs stay together
        ((3,), "abc", (0, 1, 2)),
    ],
)
def test_workers_of_a_host_are_adjacent_along_the_last_axes(shape, hosts, ordered):
    assert order_workers(shape, hosts_named(hosts)) == ordered


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.data())
def test_as_many_rows_as_possible_are_within_a_host_in_whatever_order_workers_are_named(names, data):
    length = data.draw(st.sampled_from([size for size in range(1, len(names) + 1) if len(names) % size == 0]))
    shape, hosts = (len(names) // length, length), hosts_named(names)
    ordered = order_workers(shape, dict(data.draw(st.permutations(list(hosts.items())))))
    assert ordered == order_workers(shape, hosts)
    assert sorted(ordered) == list(range(math.prod(shape)))
    rows = [ordered[start : start + length] for start in range(0, len(ordered), length)]
    within = sum(len({hosts[worker] for worker in row}) == 1 for row in rows)
    assert within == sum(names.count(name) // length for name in set(names))


def test_axes_know_whether_they_cross_hosts():
    mesh = default_mesh((2, 2), ("dp", "tp"), hosts_named("abab"))
    assert mesh.hosts == (0, 0, 1, 1)
    assert (mesh.crosses_hosts("dp"), mesh.crosses_hosts("tp"), mesh.crosses_hosts()) == (True, False, True)
    assert widest_spread(mesh, ("dp",)) == HostSpread(2, 1)
    assert widest_spread(mesh, ("tp",)) == HostSpread(1, 2)
    assert widest_spread(mesh, ("dp", "tp")) == HostSpread(2, 2)


def test_named_workers_keep_their_order():
    mesh = mesh_of_workers((2, 2), ("dp", "tp"), (0, 1, 2, 3), hosts_named("abab"))
    assert mesh.workers == (0, 1, 2, 3)
    assert (mesh.crosses_hosts("dp"), mesh.crosses_hosts("tp")) == (False, True)


def test_a_mesh_on_one_host_is_the_same_object_as_ever():
    assert default_mesh((2, 2), ("dp", "tp"), hosts_named("aaaa")) is DeviceMesh((2, 2), ("dp", "tp"))
    assert not DeviceMesh((2, 2), ("dp", "tp")).crosses_hosts()


def test_hosts_travel_and_stay_with_parts_of_a_mesh():
    mesh = default_mesh((2, 2), ("dp", "tp"), hosts_named("abab"))
    assert mesh_of(mesh.record()) is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert mesh.reshape((4,), ("all",)).hosts == (0, 0, 1, 1)
    assert mesh.submesh(dp=1) is DeviceMesh((2,), ("tp",), (1, 3))
    assert mesh.submesh(tp=0).hosts == (0, 1)


def test_a_mesh_has_a_host_for_each_worker():
    with pytest.raises(LayoutError, match="a host for each of them, not 3"):
        DeviceMesh((2, 2), hosts="aab")


@pytest.mark.parametrize(("shape", "hosts"), [((2, 2), "abab"), ((4,), "abab"), ((1, 4), "abab"), ((4, 1), "aabb")])
def test_nothing_is_said_of_a_mesh_that_fits_its_hosts(shape, hosts, caplog):
    with caplog.at_level(logging.WARNING, "gt.sharding"):
        default_mesh(shape, [f"quiet{number}" for number in range(len(shape))], hosts_named(hosts))
    assert not caplog.records


def test_a_mesh_that_does_not_fit_its_hosts_says_so_once(caplog):
    with caplog.at_level(logging.WARNING, "gt.sharding"):
        for _ in range(2):
            default_mesh((2, 4), ("uneven", "row"), hosts_named("aaabbbbb"))
    (record,) = caplog.records
    assert "axis 'row' of mesh (uneven=2, row=4)" in record.message
    assert "crosses hosts" in record.message and "hosts have 5 and 3 of them" in record.message
