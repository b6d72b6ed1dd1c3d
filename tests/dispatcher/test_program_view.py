"""A dispatcher as a dashboard reads it."""

from gt.core.messages import DefineSite
from gt.core.program_view import LineMemory, LostWorker, PairTraffic
from gt.core.worker_progress import COUNTERS, LENGTH
from gt.dispatcher.status import DispatcherView, held_parts
from tests.dispatcher_harness import A, B, C, create, harness_with, over


def view_of(harness, progress=None):
    return DispatcherView(harness.dispatcher, lambda: progress or {})


def test_memory_is_by_line_and_what_is_not_known_is_the_rest():
    harness = harness_with()
    view = view_of(harness)
    view.watch_lines(True)
    harness.tell(DefineSite(1, "a.py", 3, "f"), create(C, site=1))
    memory = view.read_memory()
    assert memory.lines == (LineMemory("a.py:3", 16, 1), LineMemory("", 32, 2))
    assert (memory.nbytes, memory.tensors, memory.dropped) == (48, 3, 0)
    view.watch_lines(False)
    assert harness.dispatcher.recent is None
    assert view.read_memory().lines == (LineMemory("", 48, 3),)


def test_tensors_that_are_alike_are_told_once():
    harness = harness_with(2)
    harness.redistribute(A, C, "x")
    largest = view_of(harness).read_memory().largest
    assert sorted((tensor.layout, tensor.mesh, tensor.count) for tensor in largest) == [
        ("-", "(w=1)", 1),
        ("-", "(w=1) of workers [1]", 1),
        ("x", "(x=2)", 1),
    ]
    harness.redistribute(B, B + 100, "x")
    assert 2 in [tensor.count for tensor in view_of(harness).read_memory().largest]


def test_replicas_are_one_part_and_partial_values_are_several():
    assert [part.part for part in held_parts(over("-"), (4,))] == [0, 0]
    assert [part.part for part in held_parts(over("- + x"), (4,))] == [0, 1]
    assert [part.intervals for part in held_parts(over("x"), (4,))] == [((0, 2),), ((2, 4),)]


def test_traffic_is_read_from_the_memory_of_workers():
    cell = [0] * LENGTH
    cell[COUNTERS : COUNTERS + 4] = [2, 500, 1, 9]  # from worker 1, and from itself
    assert view_of(harness_with(2), {0: cell}).read_traffic() == (PairTraffic(1, 0, 500),)


def test_a_lost_worker_is_told():
    harness = harness_with(2)
    harness.lose(1)
    assert view_of(harness).read_failures().lost == (LostWorker(1, 1001, "was killed", "aten.mm"),)
