"""Device meshes: their axes, workers, groups and text."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import weakref

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.errors import LayoutError
from gt.core.signatures import MeshRecord
from gt.sharding.spec import DeviceMesh, mesh_of
from tests.sharding.generators import GRID, TURNED, laws, meshes


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (GRID, "(dp=2, tp=3)"),
        (TURNED, "(dp=2, tp=3) of workers [9, 4, 7, 0, 2, 5]"),
        (DeviceMesh([2], ["dp"], name="head"), "head(dp=2)"),
        (DeviceMesh([2, 1]), "(axis0=2, axis1=1)"),
        (DeviceMesh([]), "()"),
        (DeviceMesh([], [], [3]), "() of workers [3]"),
    ],
)
def test_a_mesh_prints_its_axes_and_unusual_workers(mesh, text):
    assert str(mesh) == repr(mesh) == text


def test_a_mesh_without_names_and_workers_has_the_usual_ones():
    mesh = DeviceMesh([2, 3])
    assert (mesh.axis_names, mesh.workers, mesh.size) == (("axis0", "axis1"), (0, 1, 2, 3, 4, 5), 6)
    assert mesh is DeviceMesh((2, 3), ["axis0", "axis1"], range(6))


@given(meshes)
@laws
def test_coordinates_count_the_last_axis_fastest(mesh):
    assert [mesh.coordinate(worker) for worker in mesh.workers] == list(np.ndindex(mesh.shape))
    assert [mesh.at(mesh.coordinate(worker)) for worker in mesh.workers] == list(mesh.workers)
    assert [mesh.axis_size(axis) for axis in mesh.axis_names] == list(mesh.shape)
    assert all(worker in mesh for worker in mesh.workers) and max(mesh.workers) + 1 not in mesh


@pytest.mark.parametrize(
    ("worker", "axes", "members"),
    [
        (7, ["tp"], (9, 4, 7)),
        (7, ["dp"], (7, 5)),
        (5, ["dp"], (7, 5)),
        (7, ["dp", "tp"], (9, 4, 7, 0, 2, 5)),
        (7, ["tp", "dp"], (9, 0, 4, 2, 7, 5)),
        (7, [], (7,)),
    ],
)
def test_an_axis_group_runs_along_some_axes(worker, axes, members):
    assert TURNED.axis_group(worker, axes) == members


@given(meshes, st.data())
@laws
def test_axis_groups_divide_a_mesh(mesh, data):
    axes = data.draw(st.permutations(mesh.axis_names))[: data.draw(st.integers(0, len(mesh.shape)))]
    groups = {mesh.axis_group(worker, axes) for worker in mesh.workers}
    assert sorted(itertools.chain(*groups)) == sorted(mesh.workers)
    assert all(worker in mesh.axis_group(worker, axes) for worker in mesh.workers)
    other = [position for position, axis in enumerate(mesh.axis_names) if axis not in axes]
    for axis_group in groups:
        assert len(axis_group) == math.prod([mesh.axis_size(axis) for axis in axes])
        assert len({tuple([mesh.coordinate(worker)[position] for position in other]) for worker in axis_group}) == 1


def test_a_submesh_may_be_a_rectangle():
    part = GRID.submesh((2, 2), (0, 1))
    assert (part.shape, part.axis_names, part.workers) == ((2, 2), ("dp", "tp"), (1, 2, 4, 5))
    assert GRID.submesh((1, 3)) is GRID.submesh((1, 3), (0, 0)) and GRID.submesh(None, (1, 1)).workers == (4, 5)
    assert GRID.submesh(GRID.shape) is GRID


@given(meshes, st.data())
@laws
def test_a_submesh_is_a_part_of_the_grid(mesh, data):
    fixed = {
        axis: data.draw(st.integers(0, size - 1))
        for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)
        if data.draw(st.booleans())
    }
    grid = np.array(mesh.workers).reshape(mesh.shape)[tuple([fixed.get(axis, slice(None)) for axis in mesh.axis_names])]
    part = mesh.submesh(**fixed)
    assert (part.shape, part.workers) == (grid.shape, tuple(grid.flatten().tolist()))
    assert part.axis_names == tuple([axis for axis in mesh.axis_names if axis not in fixed])
    assert part.name == mesh.name
    assert (part is mesh) == (not fixed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceMesh([2, 2], ["dp"]), r"shape \(2, 2\) needs 2 different axis names, not \('dp',\)"),
        (lambda: DeviceMesh([2, 2], ["dp", "dp"]), r"needs 2 different axis names, not \('dp', 'dp'\)"),
        (lambda: DeviceMesh([2], ["d p"]), "'d p' cannot name a mesh axis: use up to 64 letters, digits"),
        (lambda: DeviceMesh([2], ["-"]), "'-' cannot name a mesh axis"),
        (lambda: DeviceMesh([2], ["2d"]), "'2d' cannot name a mesh axis"),
        (lambda: DeviceMesh([2], ["dp\n"]), "cannot name a mesh axis"),
        (lambda: DeviceMesh([2], ["dp"], [0, 1, 2]), r"shape \(2,\) needs 2 workers, not 3"),
        (lambda: DeviceMesh([2], ["dp"], [4, 4]), r"a worker has one place in a mesh; \[4, 4\] names one twice"),
        (lambda: DeviceMesh([0], ["dp"]), r"at least one worker along every axis; its shape cannot be \(0,\)"),
        (lambda: DeviceMesh([-2, -2], ["dp", "tp"]), r"its shape cannot be \(-2, -2\)"),
        (lambda: GRID.submesh(pp=0), r"mesh \(dp=2, tp=3\) has no axis 'pp'; it has dp, tp"),
        (lambda: GRID.submesh(tp=3), r"axis 'tp' of mesh \(dp=2, tp=3\) has coordinates 0 to 2"),
        (lambda: GRID.submesh(tp=0.5), r"axis 'tp' of mesh \(dp=2, tp=3\) has coordinates 0 to 2"),
        (lambda: GRID.submesh(tp=-1), "coordinates 0 to 2"),
        (lambda: GRID.submesh((2, 2), (0, 2)), r"mesh \(dp=2, tp=3\) has no part of shape \(2, 2\) at offset \(0, 2\)"),
        (lambda: GRID.submesh((0, 1)), r"no part of shape \(0, 1\)"),
        (lambda: GRID.submesh((2,)), r"no part of shape \(2,\)"),
        (lambda: GRID.submesh((1, 1), (-1, 0)), r"at offset \(-1, 0\)"),
        (lambda: GRID.submesh((1, 1), (0, 0, 0)), r"at offset \(0, 0, 0\)"),
        (lambda: GRID.submesh((1, 1), dp=0), "takes a shape and an offset, or dp=, and not both"),
        (lambda: GRID.at((0, 3)), r"mesh \(dp=2, tp=3\) has no coordinate \(0, 3\); its last one is \(1, 2\)"),
        (lambda: GRID.at((-1, 0)), r"no coordinate \(-1, 0\)"),
        (lambda: GRID.at((1,)), r"no coordinate \(1,\)"),
        (lambda: GRID.coordinate(99), r"worker 99 is not in mesh \(dp=2, tp=3\)"),
    ],
)
def test_invalid_meshes_are_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


@given(meshes)
@laws
def test_equal_meshes_are_one_object(mesh):
    same = DeviceMesh(list(mesh.shape), list(mesh.axis_names), list(mesh.workers), mesh.name)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(mesh.record()), type=MeshRecord)
    assert same is mesh and hash(same) == hash(mesh)
    assert mesh_of(wire) is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh is copy.deepcopy(mesh)


def test_meshes_that_differ_in_anything_are_not_equal():
    different = [
        GRID,
        TURNED,
        DeviceMesh([3, 2], ["dp", "tp"]),
        DeviceMesh([2, 3], ["tp", "dp"]),
        DeviceMesh([2, 3], ["dp", "tp"], name="head"),
        DeviceMesh([6], ["dp"]),
    ]
    assert len(set(different)) == len(different)


def test_unreferenced_meshes_are_collected():
    gone = weakref.ref(DeviceMesh([2], ["dp"], [40, 41], "held by nobody"))
    assert gone() is None
