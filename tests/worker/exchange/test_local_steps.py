"""The boxes of a step: each that one worker takes is given by another, and steps with one recipe get one value."""

import pytest

from gt.sharding.spec import DeviceMesh
from gt.worker.moves import Mover
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import ENGINE, dense, step_of

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


def steps_of_workers(source, target, size=7):
    """For each step of a move, the local steps of the workers that take part in it."""
    workers = sorted({*source.mesh.workers, *target.mesh.workers})
    movers = {worker: Mover(ENGINE, worker, dense((size,)), source, target) for worker in workers}
    for steps in zip(*[mover.steps for mover in movers.values()], strict=True):
        yield {step.worker: step for step in steps if step is not None}


@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_what_a_worker_takes_is_given(source, target):
    for steps in steps_of_workers(source, target):
        for worker, step in steps.items():
            for addend in step.addends:
                for box in addend:
                    if box.peer != worker:
                        assert steps[box.peer].gives[worker] == (box.source, box.meta)
            assert all(worker in steps[peer].peers for peer in step.gives)


@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_bytes_sent_are_received_and_members_agree(source, target):
    for steps in steps_of_workers(source, target):
        for worker, step in steps.items():
            assert {peer: steps[peer].sent[worker] for peer in step.received} == step.received
            for member in step.members:
                assert steps[member].members == step.members
                assert steps[member].is_even == step.is_even


def test_members_are_those_along_the_changed_axes():
    step = step_of(3, dense((4,)), over("- + a", GRID), over("-", GRID))
    assert step.members == (3, 0) and step.reduction == "sum" and step.holders == (3, 0)


def test_workers_with_the_same_part_after_a_step_have_one_recipe():
    recipes = {worker: step_of(worker, dense((4,)), at(0), over("-", TRIO)).recipe for worker in (0, 1, 2)}
    assert len(set(recipes.values())) == 1
    cut = {worker: step_of(worker, dense((6,)), at(0), over("x", TRIO)).recipe for worker in (0, 1, 2)}
    assert len(set(cut.values())) == 3
