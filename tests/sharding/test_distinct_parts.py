"""The distinct parts of a tensor in a layout."""

from gt.sharding.held_parts import distinct_parts, parts_to_read
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec

MESH = DeviceMesh((2, 2), ("dp", "tp"))


def test_replicas_share_a_part():
    parts = distinct_parts(parse_spec("dp, -", MESH), (5, 3))
    assert [(part.box, part.workers) for part in parts] == [(((0, 3), (0, 3)), (0, 1)), (((3, 5), (0, 3)), (2, 3))]


def test_each_addend_of_a_partial_tensor_has_its_parts():
    parts = distinct_parts(parse_spec("dp + tp", MESH), (2,))
    assert [(part.addend, part.box, part.workers) for part in parts] == [
        (0, ((0, 1),), (0,)),
        (0, ((1, 2),), (2,)),
        (1, ((0, 1),), (1,)),
        (1, ((1, 2),), (3,)),
    ]


def test_empty_parts_are_not_read():
    assert [part.workers for part in parts_to_read(parse_spec("dp + tp", MESH), (1,))] == [(0,), (1,)]


def test_one_part_of_an_empty_tensor_is_read():
    assert [part.workers for part in parts_to_read(parse_spec("dp, tp", MESH), (4, 0))] == [(0, 1)]
