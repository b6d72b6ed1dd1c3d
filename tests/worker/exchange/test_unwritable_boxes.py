"""A member that has a value and cannot give it to the others, or has no memory for the exchange, fails as they do, over
each transport, and later exchanges pair rightly."""

from operator import itemgetter

import pytest
import torch

from gt.sharding.spec import DeviceMesh
from gt.worker.exchange import collective_works, shared_memory_groups
from gt.worker.exchange.message_layout import MessageLayout
from gt.worker.exchange.process_groups import ProcessGroup
from gt.worker.failed_value import FailedValue
from tests.dispatcher_harness import over
from tests.worker.exchange.tasks import dense, task_of
from tests.worker.exchange.transports import PROCESS_TRANSPORTS, run_over

WORKERS = 3
GIVER = 1
MESH = DeviceMesh([WORKERS], ["x"], range(WORKERS))
MOVES = {  # the last number: boxes that a process group's giver can write before it fails
    "all-reduce": ("- + x", "-", (6,), 0),
    "all-reduce of maxima": ("- + x:max", "-", (6,), 2),
    "all-gather": ("x", "-", (6,), 0),
    "uneven all-gather": ("x", "-", (5,), 1),
    "reduce-scatter": ("- + x", "x", (6,), 1),
    "all-to-all": ("x, -", "-, x", (6, 6), 1),
}


def fail_at_giver(monkeypatch, owner, name, find_task, written=0):
    """A function that writes boxes fails on the giver, after it has written some."""
    write, calls = getattr(owner, name), []

    def write_or_fail(*arguments):
        if find_task(arguments).step.worker == GIVER:
            calls.append(arguments)
            if len(calls) > written:
                raise MemoryError("no room")
        return write(*arguments)

    monkeypatch.setattr(owner, name, write_or_fail)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_a_member_that_cannot_give_its_boxes_fails_as_the_takers_do(monkeypatch, transport, move):
    source, target, shape, written = MOVES[move]
    fail_at_giver(monkeypatch, MessageLayout, "_copy", itemgetter(3), written)
    fail_at_giver(monkeypatch, collective_works, "_copy_flat", itemgetter(0))
    fail_at_giver(monkeypatch, shared_memory_groups, "_write", itemgetter(0))

    def compute(worker):
        task = task_of(worker, None, over(source, MESH), over(target, MESH), dense(shape))
        (result,) = yield [task._replace(value=torch.ones(task.step.before.shape))]
        return result

    results = run_over(transport, {worker: compute(worker) for worker in range(WORKERS)})
    assert all(isinstance(result, FailedValue) for result in results.values()), results
    assert {result.failure.message for result in results.values()} == {"no room"}


LARGE = 900_000  # elements, whose message has several pieces
LARGE_MOVES = {
    "all-reduce": ("- + x", "-", (LARGE,)),
    "all-reduce of maxima": ("- + x:max", "-", (LARGE,)),
    "all-gather": ("x", "-", (LARGE,)),
    "all-to-all": ("x, -", "-, x", (900, 900)),
    "agreed sends": ("x", "-", (4 * LARGE + 1,)),
    "sends": ("x", "-", (4 * LARGE + 1,)),
    "small sends": ("x", "-", (5,)),
}
SENDS = ("sends", "small sends")
LACKING = {"all": range(99), "the first": [0], "those it receives": [2, 3]}  # its buffers, in their order


def parts_of(move):
    """The part of each worker after a move over Gloo, and in the memory of one process."""
    source, target, shape = LARGE_MOVES[move]

    def compute(worker):
        task = task_of(worker, None, over(source, MESH), over(target, MESH), dense(shape))
        (result,) = yield [task._replace(value=torch.full(task.step.before.shape, float(worker)))]
        return result

    return [run_over(way, {worker: compute(worker) for worker in range(WORKERS)}) for way in ("gloo", "memory")]


def deny_memory(patch, buffers):
    """The giver gets no memory for some of the buffers of an exchange."""
    counts = iter(range(99))

    def denying(allocate):
        def take(owner, *arguments):
            group = owner if isinstance(owner, ProcessGroup) else owner._group
            if group.worker == GIVER and next(counts) in buffers:
                raise MemoryError("no room")
            return allocate(owner, *arguments)

        return take

    for owner, name in ((ProcessGroup, "buffer"), (collective_works.SumWork, "_buffer")):
        patch.setattr(owner, name, denying(getattr(owner, name)))


@pytest.mark.parametrize(
    ("move", "lacking"),
    [(move, lacking) for move in LARGE_MOVES for lacking in LACKING if lacking == "all" or move in SENDS],
)
def test_a_member_without_memory_takes_part_and_later_exchanges_pair_rightly(monkeypatch, move, lacking):
    if move == "agreed sends":
        monkeypatch.setattr(collective_works.PointToPointWork, "agreed_bytes", 0)
    with monkeypatch.context() as patch:
        deny_memory(patch, LACKING[lacking])
        found, expected = parts_of(move)
    for worker, part in found.items():
        if worker == GIVER or lacking != "those it receives":
            assert part.failure.message == "no room"
        else:
            assert torch.equal(part, expected[worker])
    found, expected = parts_of(move)
    assert all(torch.equal(found[worker], expected[worker]) for worker in range(WORKERS))
