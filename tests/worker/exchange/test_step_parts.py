"""The boxes of a step: each that one worker takes is given by another, and parts with one recipe get one value."""

import pytest

from gt.sharding.spec import DeviceMesh
from gt.worker.moves import Mover
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import ENGINE, dense, part_of

TRIO = DeviceMesh([3], ["x"], [2, 0, 1])
GRID = DeviceMesh([2, 2], ["a", "b"], [3, 1, 0, 2])
SPECS = [at(0), at(1), over("-", TRIO), over("x", TRIO), over("x[0:1 1:2 2:7]", TRIO), over("- + x", TRIO)]
SPECS += [over("a b", GRID), over("b + a", GRID), over("- + a b", GRID)]
CHANGES = [
    pytest.param(source, target, id=f"{source} on {source.mesh} to {target} on {target.mesh}")
    for source in SPECS
    for target in SPECS
    if not target.partial
]


def parts_by_step(source, target, size=7):
    """For each step of a move, the parts of the workers that take part in it."""
    workers = sorted({*source.mesh.workers, *target.mesh.workers})
    movers = {worker: Mover(ENGINE, worker, dense((size,)), source, target) for worker in workers}
    for parts in zip(*[mover.parts for mover in movers.values()], strict=True):
        yield {part.worker: part for part in parts if part is not None}


@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_what_a_worker_takes_is_given(source, target):
    for parts in parts_by_step(source, target):
        for worker, part in parts.items():
            for addend in part.addends:
                for piece in addend:
                    if piece.peer != worker:
                        assert parts[piece.peer].gives[worker] == (piece.source, piece.meta)
            assert all(worker in parts[peer].peers for peer in part.gives)


@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_bytes_sent_are_received_and_members_agree(source, target):
    for parts in parts_by_step(source, target):
        for worker, part in parts.items():
            assert {peer: parts[peer].sent[worker] for peer in part.received} == part.received
            for member in part.members:
                assert parts[member].members == part.members
                assert parts[member].is_even == part.is_even


def test_members_are_those_along_the_changed_axes():
    part = part_of(3, dense((4,)), over("- + a", GRID), over("-", GRID))
    assert part.members == (3, 0) and part.reduction == "sum" and part.holders == (3, 0)


def test_workers_with_the_same_part_after_a_step_have_one_recipe():
    recipes = {worker: part_of(worker, dense((4,)), at(0), over("-", TRIO)).recipe for worker in (0, 1, 2)}
    assert len(set(recipes.values())) == 1
    cut = {worker: part_of(worker, dense((6,)), at(0), over("x", TRIO)).recipe for worker in (0, 1, 2)}
    assert len(set(cut.values())) == 3
