"""The tensors that were lost with a worker, by the lines that made them."""

import os
import signal

import pytest

import gt
from gt.core.messages import LostLine
from gt.core.meta import TensorMeta
from gt.dispatcher.membership import MAX_EXAMPLES, MAX_LINES, describe_losses
from gt.dispatcher.message_queue import ToWorkers
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_stories import KEPT, RecentMessages
from tests.dispatcher_harness import OP, A, B, run


def meta(*shape):
    return TensorMeta(shape, (1,) * len(shape), 0, "float32")


def test_tensors_of_one_line_are_told_together_the_largest_first():
    lost = [(1, meta(2)), (2, meta(100)), (3, meta(2)), (4, meta(5))]
    sites = {1: 7, 2: 8, 3: 7}
    assert describe_losses(lost, sites) == (
        LostLine(8, 1, 400, ("float32[100]",)),
        LostLine(7, 2, 16, ("float32[2]",)),
        LostLine(0, 1, 20, ("float32[5]",)),
    )


def test_the_list_is_bounded():
    lost = [(number, meta(number)) for number in range(1, 101)]
    lines = describe_losses(lost, {number: number for number in range(1, 101)})
    assert len(lines) == MAX_LINES + 1
    assert lines[0] == LostLine(100, 1, 400, ("float32[100]",))
    assert (lines[-1].site, lines[-1].tensors, len(lines[-1].examples)) == (0, 100 - MAX_LINES, MAX_EXAMPLES)
    assert sum(line.nbytes for line in lines) == sum(4 * number for number in range(1, 101))


@pytest.mark.parametrize("is_alive", [True, False])
def test_the_line_of_a_tensor_that_outlives_its_message_is_known(is_alive):
    messages, session = RecentMessages({A} if is_alive else {B}), SessionRecord(1, "", 1)
    made = run(OP, (), (A,), site=7)
    messages.add([ToWorkers((0,), made)], has_bytes=False)
    assert messages.find_sites(session, [A]) == {A: made.site}
    for _ in range(KEPT):
        messages.add([ToWorkers((0,), run(OP, (), (B,)))], has_bytes=False)
    assert messages.find_sites(session, [A]) == ({A: made.site} if is_alive else {})


def test_a_lost_worker_is_told_with_the_lines_of_its_tensors():
    gt.init(workers=2)
    try:
        mesh = gt.mesh(2, ("w",))
        kept = gt.ones(6, mesh=mesh, placements=gt.Replicate())
        weights = gt.randn(4, 3, mesh=mesh, placements=gt.Shard(0))
        gt.synchronize()
        worker = gt.workers()[0]

        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(gt.WorkerLost) as error:
            while True:
                weights.sum().item()
        said = str(error.value)
        assert "Lost are " in said and "test_lost_lines.py:" in said and "float32[4, 3]" in said
        assert "float32[6]" not in said and kept.sum().item() == 6
    finally:
        gt.shutdown()
