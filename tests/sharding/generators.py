"""Hypothesis strategies for meshes, specs and shapes."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import settings
from hypothesis import strategies as st

from gt.sharding.spec import REDUCTIONS, DeviceMesh, ShardingSpec

NAMES = ("dp", "tp", "pp")
GRID = DeviceMesh([2, 3], ["dp", "tp"])
TURNED = DeviceMesh([2, 3], ["dp", "tp"], [9, 4, 7, 0, 2, 5])
CUBE = DeviceMesh([2, 2, 2], NAMES)
laws = settings(max_examples=100, deadline=None)
SIZES_OF_MESHES = [(), (1,), (2,), (5,), (2, 3), (3, 2), (1, 4), (4, 2), (2, 2, 2), (3, 1, 2), (2, 3, 2)]


def some_mesh(shape, mixed):
    """The default mesh of a shape; if `mixed`, a named one over any workers in any order."""
    workers = random.Random(str(shape)).sample(range(math.prod(shape) + 2), math.prod(shape)) if mixed else ()
    return DeviceMesh(shape, NAMES[: len(shape)], workers, "all" if mixed else "")


meshes = st.sampled_from([some_mesh(shape, mixed) for shape in SIZES_OF_MESHES for mixed in (False, True)])


@st.composite
def specs(draw, mesh, rank):
    """Specs in which every axis cuts a dim, is partial or replicates, with the axes of a dim in any order."""
    axes = draw(st.sampled_from(list(itertools.permutations(mesh.axis_names))))
    positions = dict(
        zip(axes, draw(st.lists(st.integers(-2, rank - 1), min_size=len(axes), max_size=len(axes))), strict=True)
    )
    dims = [[axis for axis, position in positions.items() if position == dim] for dim in range(rank)]
    partial = [axis for axis, position in positions.items() if position == -2]
    return ShardingSpec(mesh, dims, partial, draw(st.sampled_from(REDUCTIONS)))


@st.composite
def other_cuts(draw, spec, shape):
    """The spec with other cuts of some dims."""
    cuts = [None] * len(shape)
    for dim, size in enumerate(shape):
        if spec.dims[dim] and draw(st.booleans()):
            count = spec.shards(dim) - 1
            positions = draw(st.lists(st.integers(0, size), min_size=count, max_size=count))
            cuts[dim] = tuple(itertools.pairwise([0, *sorted(positions), size]))
    return spec.replace(cuts=cuts)


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def layouts(draw):
    """A spec and a shape for it, uneven and empty shards included."""
    shape = draw(SHAPES)
    return draw(other_cuts(draw(specs(draw(meshes), len(shape))), shape)), shape
