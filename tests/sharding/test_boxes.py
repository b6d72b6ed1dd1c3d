"""Default cuts of a dim, and partitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.sharding.boxes import balanced_cuts, box_elements, box_shape, intersect
from tests.sharding.generators import laws


@pytest.mark.parametrize(
    ("size", "counts", "sizes"),
    [
        (8, (4,), "2 2 2 2"),
        (10, (4,), "3 3 2 2"),
        (10, (2, 2), "3 2 3 2"),  # not 3 3 2 2: the halves come first
        (3, (2, 2), "1 1 1 0"),
        (5, (2, 3), "1 1 1 1 1 0"),
        (2, (3,), "1 1 0"),
        (7, (), "7"),
        (7, (1, 1), "7"),
        (0, (2,), "0 0"),
    ],
)
def test_where_dims_are_cut(size, counts, sizes):
    assert " ".join(str(stop - start) for start, stop in balanced_cuts(size, counts)) == sizes


SIZES, COUNTS = st.integers(0, 60), st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(SIZES, COUNTS)
@laws
def test_cuts_cover_a_dim_in_order(size, counts):
    cuts = balanced_cuts(size, counts)
    assert len(cuts) == math.prod(counts)
    assert (cuts[0][0], cuts[-1][1]) == (0, size)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cuts))
    assert all(start <= stop for start, stop in cuts)


@given(SIZES, COUNTS)
@laws
def test_cuts_are_even(size, counts):
    sizes = [stop - start for start, stop in balanced_cuts(size, counts)]
    assert max(sizes) - min(sizes) <= 1
    assert (0 in sizes) == (size < len(sizes))


@given(SIZES, COUNTS, st.integers(1, 5))
@laws
def test_cuts_of_more_axes_refine_those_of_fewer(size, counts, more):
    fine = balanced_cuts(size, (*counts, more))
    groups = [fine[position : position + more] for position in range(0, len(fine), more)]
    assert tuple([(group[0][0], group[-1][1]) for group in groups]) == balanced_cuts(size, counts)
    for group in groups:
        sizes = [stop - start for start, stop in group]
        assert sizes == [len(part) for part in np.array_split(np.arange(sum(sizes)), more)]  # the larger ones first


BOXES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted).map(tuple), min_size=2, max_size=2).map(
    tuple
)


def elements(box):
    return set(itertools.product(*[range(*interval) for interval in box]))


@given(BOXES, BOXES)
@laws
def test_boxes_are_sets_of_elements(one, other):
    shared = intersect(one, other)
    assert (elements(shared) if shared is not None else set()) == elements(one) & elements(other)
    assert (shared is None) == (not elements(one) & elements(other))
    assert box_elements(one) == len(elements(one)) == math.prod(box_shape(one))
