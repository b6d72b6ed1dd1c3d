"""Memory of tensors that a worker records: live and at the peak, originals and copies apart, by line."""

import pytest
import torch

import gt
from gt.core.errors import SessionError
from gt.core.ids import FIRST_DISPATCHER_ID
from gt.core.messages import FreeTensors, MemoryUse, RunOp
from gt.worker.engines.numpy_engine import NumPyEngine
from gt.worker.engines.pytorch_engine import PyTorchEngine
from gt.worker.memory_recorder import MemoryRecorder
from tests.records import meta, own

A, B, C = own(1), own(2), own(3)
COPY = own(FIRST_DISPATCHER_ID + 1)


@pytest.fixture(params=[PyTorchEngine, NumPyEngine])
def engine(request):
    return request.param()


class Worker:
    """A recorder that is told of commands whose effects it sees in `tensors`."""

    def __init__(self, engine):
        self.engine = engine
        self.tensors = {}
        self.recorder = MemoryRecorder(engine, self.tensors)

    def make(self, ident, elements, site):
        self.tensors[ident] = self.engine.empty(meta(elements))
        self.recorder.note(RunOp(own(9), (), (ident,), (), 0, site))

    def free(self, ident):
        del self.tensors[ident]
        self.recorder.note(FreeTensors((ident,)))

    def take(self):
        return self.recorder.take(1, goes_on=False)


def test_a_tensor_that_replaces_another_under_its_id_is_counted_once():
    """As a reduced gradient does with the partial one."""
    tensors = {own(1): torch.zeros(1000)}
    recorder = MemoryRecorder(PyTorchEngine("cpu"), tensors)
    recorder.take(1, goes_on=True)
    tensors[own(1)] = torch.zeros(10)
    recorder.note(RunOp(own(9), (own(1),), (own(1),), (), 0, 3))
    uses, _ = recorder.take(1, goes_on=False)
    assert sum(use.live for use in uses) == 40


def test_tensors_are_counted_by_line_now_and_at_the_peak(engine):
    worker = Worker(engine)
    worker.recorder.take(1, goes_on=True)
    worker.make(A, 10, 5)
    worker.make(B, 20, 5)
    worker.make(C, 5, 6)
    worker.free(B)
    worker.make(B, 8, 7)
    assert worker.take() == ((MemoryUse(5, False, 40, 120), MemoryUse(6, False, 20, 20), MemoryUse(7, False, 32, 0)), 0)


def test_copies_are_apart_and_their_most_is_kept(engine):
    worker = Worker(engine)
    worker.recorder.take(1, goes_on=True)
    worker.make(COPY, 10, 5)
    worker.free(COPY)
    worker.make(A, 100, 6)
    assert worker.take() == ((MemoryUse(6, False, 400, 400),), 40)


def test_tensors_that_share_memory_count_once(engine):
    worker = Worker(engine)
    worker.recorder.take(1, goes_on=True)
    worker.make(A, 10, 5)
    worker.tensors[B] = worker.tensors[A][2:4]
    worker.recorder.note(RunOp(own(9), (A,), (B,), (), 0, 6))
    worker.free(A)
    assert worker.take() == ((MemoryUse(5, False, 40, 40),), 0)


def test_a_write_in_place_takes_no_memory(engine):
    worker = Worker(engine)
    worker.recorder.take(1, goes_on=True)
    worker.make(A, 10, 5)
    worker.tensors[B] = worker.tensors.pop(A)
    worker.recorder.note(RunOp(own(9), (A,), (B,), (), 0, 6))
    assert worker.take() == ((MemoryUse(5, False, 40, 40),), 0)


def test_older_tensors_have_no_line_and_other_sessions_are_left_out(engine):
    worker = Worker(engine)
    worker.make(A, 10, 5)
    worker.make(own(1, session=2), 10, 5)
    worker.recorder.take(1, goes_on=True)
    worker.make(own(2, session=2), 10, 5)
    assert worker.take() == ((MemoryUse(0, False, 40, 40),), 0)
    assert not worker.recorder.is_on


def test_a_session_that_ends_is_no_longer_recorded(engine):
    worker = Worker(engine)
    worker.recorder.take(1, goes_on=True)
    worker.recorder.forget(1)
    assert not worker.recorder.is_on
    assert worker.take() == ((), 0)


def test_memory_of_a_program(anywhere):
    kept = gt.ones(100)
    with gt.debug.memory() as m:
        made = kept + 1
        made.mul_(2)
        gone = torch.exp(made)
        del gone
    (memory,) = [memory for memory in m.workers.values() if memory.peak.total]
    assert (memory.live.originals, memory.peak.originals, memory.live.copies) == (800, 1200, 0)
    assert [(line.line.rpartition("/")[2][:13], line.peak.total) for line in memory.lines[:1]] == [("before", 400)]
    assert {line.line.partition(":")[0].rpartition("/")[2] for line in memory.lines} == {
        "before",
        "test_memory_recorder.py",
    }
    assert m.peak == 1200


def test_copies_are_named_by_the_line_that_needed_them(four_workers):
    rows = [gt.Shard(0)]
    x, y = [gt.ones(8, 8, mesh=gt.mesh(4), placements=rows) for _ in range(2)]
    with gt.debug.memory() as m:
        z = x @ y
    (line,) = [line for line in m.workers[1].lines if line.line != "before"]
    assert line.line.startswith(f"{__file__}:")
    assert line.peak == (z.numel() * 4 // 4, y.numel() * 4)
    assert m.workers[1].most_copies == y.numel() * 4


def test_blocks_cannot_be_nested(embedded):
    with gt.debug.memory(), pytest.raises(SessionError, match="measured already"), gt.debug.memory():
        pass
    with gt.debug.memory() as m:
        x = gt.ones(4)
    assert m.workers[0].live.total == 16 == x.numel() * 4


def test_memory_that_was_not_recorded_says_how_it_is(embedded):
    assert "print this after its block" in str(gt.debug.memory())


def test_memory_of_worker_processes(two_processes):
    mesh = gt.mesh(2)
    with gt.debug.memory() as m:
        x = gt.ones(8, 4, mesh=mesh, placements=[gt.Shard(0)])
        y = x.redistribute(placements=[gt.Replicate()])
    assert {worker: memory.live.originals for worker, memory in m.workers.items()} == {0: 192, 1: 192}
    assert x.shape == y.shape


@pytest.mark.parametrize("backend", ["pytorch", "numpy"])
def test_an_empty_part_of_a_split_keeps_no_memory(backend):
    """The columns of the first part are on the first two workers."""
    gt.shutdown()  # of the tests before, which share a session
    gt.init(workers=4, mode="virtual", backend=backend)
    x = gt.ones(8, 12, mesh=gt.mesh((4,), ("tp",)), placements="-, tp")
    first = torch.unsafe_chunk(x, 3, 1)[0]
    del x
    with gt.debug.memory() as m:
        assert first.shape == (8, 4)
    assert [m.workers[worker].live.total for worker in (2, 3)] == [0, 0]
    gt.shutdown()
