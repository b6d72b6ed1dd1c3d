"""Estimated seconds of a collective, and the memory of a layout."""

import pytest

from gt.sharding.cost import GLOO, LinkSpeed, memory_bytes, seconds
from gt.sharding.spec_text import parse_spec
from tests.sharding.numpy_workers import mesh_of


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
