"""The collectives that a change of layout needs, as `gt.debug` records them."""

from pathlib import Path

import pytest
import torch

import gt
from tests.client.layout_cases import mesh_of

HERE = Path(__file__).name
EVEN = torch.arange(64.0).reshape(8, 8)  # 256 bytes


@pytest.mark.parametrize(
    ("source", "target", "kinds", "moved"),
    [
        ("dp tp, -", "-, -", ["all-gather dp tp"], 8 * 256 * 7 // 8),
        ("-, dp", "-, -", ["all-gather dp"], 8 * 256 // 2),
        ("-, -", "dp, tp", [], 0),
        ("dp, tp", "dp, tp", [], 0),
        ("dp, -", "dp tp, -", [], 0),
        ("-, -", "tp, - + dp", [], 0),
        ("dp, -", "-, dp", ["all-to-all dp"], 8 * 128 // 2),
        ("dp tp, -", "-, dp tp", ["all-to-all dp tp"], 8 * 32 * 7 // 8),
        ("dp, - + tp", "dp tp, -", ["reduce-scatter tp"], 8 * 128 * 3 // 4),
        ("dp, - + tp", "dp, -", ["all-reduce tp"], 2 * 8 * 128 * 3 // 4),
    ],
)
def test_collectives_between_layouts(eight_workers, source, target, kinds, moved):
    ours = gt.distribute(EVEN, mesh_of("2x4"), source)
    with gt.debug.comm() as comm:
        again = ours.redistribute(placements=target)
    assert [f"{event.kind} {event.axis}" for event in comm.events] == kinds
    assert comm.bytes == sum(event.bytes for event in comm.events) == sum(comm.pairs.values()) == moved
    assert torch.equal(again.cpu(), EVEN)


@pytest.mark.parametrize(
    ("source", "target", "kind", "moved"),
    [
        (([5], "-, -"), ([6], "-, -"), "send", 256),
        (([5], "-, -"), ([0, 1], "-, -"), "broadcast", 512),
        (([5], "-, -"), ([0, 1], "x, -"), "scatter", 256),
        (([0, 1], "x, -"), ([5], "-, -"), "gather", 256),
        (([0, 1], "x, -"), ([1, 0], "x, -"), "permute", 256),
        (([0, 1], "x, -"), ([2, 3], "x, -"), "send", 256),
        (([0, 1], "-, - + x"), ([5], "-, -"), "reduce", 512),
    ],
)
def test_collectives_between_meshes(eight_workers, source, target, kind, moved):
    meshes = [gt.mesh(len(workers), ("x",), workers=workers) for workers, _ in (source, target)]
    ours = gt.distribute(EVEN, meshes[0], source[1])
    with gt.debug.comm() as comm:
        again = ours.redistribute(meshes[1], target[1])
    assert (comm.bytes, comm.count(kind)) == (moved, 1)
    assert {receiver for _, receiver in comm.pairs} <= {*target[0]} and {sender for sender, _ in comm.pairs} <= {
        *source[0]
    }
    assert torch.equal(again.cpu(), EVEN)


def test_an_event_names_the_op_and_the_line(eight_workers):
    ours = gt.distribute(EVEN, mesh_of("2x4"), "dp, - + tp")
    with gt.debug.comm() as comm:
        ours.relu()
    (event,) = comm.events
    assert (event.kind, event.axis, event.op) == ("all-reduce", "tp", "aten.relu.default")
    file, _, line = event.line.rpartition(":")
    assert Path(file).name == HERE and "ours.relu()" in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert comm.count("all-reduce") == 1 and comm.count("all-gather") == 0


def test_only_ops_inside_are_recorded(eight_workers):
    ours = gt.distribute(EVEN, mesh_of("2x4"), "dp tp, -")
    ours.redistribute()
    with gt.debug.comm() as nothing:
        pass
    with gt.debug.comm() as comm:
        ours.redistribute()
        inside = len(comm.events)  # known at the end
    ours.redistribute(placements="-, dp")
    assert (nothing.bytes, nothing.events, nothing.pairs, inside) == (0, [], {}, 0)
    assert (len(comm.events), comm.bytes) == (1, 1792)
