"""Exchanges over process groups: which way a step goes, and the order of sends and receives."""

from collections import Counter

import pytest
import torch

from gt.sharding.spec import DeviceMesh
from gt.worker.exchange.failure_texts import FailureTexts
from gt.worker.exchange.group_backends import NcclGroup, can_use_nccl
from gt.worker.exchange.in_flight import InFlightSends
from gt.worker.exchange.process_groups import ProcessGroup, way_of
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import dense, part_of, task_of

TRIO = DeviceMesh([3], ["x"], [0, 1, 2])
GRID = DeviceMesh([2, 2], ["a", "b"], [0, 1, 2, 3])
NATIVE = ("float32", "float64", "int32", "int64")
DTYPES = (*NATIVE, "float16", "bfloat16", "int8", "int16", "uint8", "bool", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "prod", "max", "min", "and", "or"])
def test_the_group_itself_reduces_only_sums_that_it_adds_as_gt_does(dtype, reduction):
    part = part_of(0, dense((6,), dtype), over(f"- + x:{reduction}"), over("-"))
    is_native = reduction == "sum" and dtype in NATIVE
    assert way_of(part) == ("all-reduce" if is_native else "all-to-all and all-gather")


@pytest.mark.parametrize(
    ("source", "target", "shape", "way"),
    [
        (over("x"), over("-"), (6,), "all-gather"),
        (over("x"), over("-"), (5,), "point-to-point"),  # uneven
        (over("x[0:1 1:6]"), over("-"), (6,), "point-to-point"),
        (over("x, -"), over("-, x"), (4, 6), "all-to-all"),
        (over("x, -"), over("-, x"), (4, 5), "point-to-point"),
        (over("- + x"), over("x"), (6,), "all-to-all"),  # a reduce-scatter
        (over("- + x"), over("x"), (5,), "point-to-point"),
        (over("- + x"), at(0), (6,), "point-to-point"),
        (at(0), over("-"), (6,), "point-to-point"),
        (at(0), at(1), (6,), "point-to-point"),
        (over("a, b", GRID), over("a, -", GRID), (4, 4), "all-gather"),
    ],
)
def test_an_even_step_is_a_collective_and_others_are_sends(source, target, shape, way):
    assert way_of(part_of(0, dense(shape), source, target)) == way


@pytest.mark.parametrize(
    ("gpus", "can"),
    [
        (["a", "b"], True),
        (["a", "b", "a"], False),  # two workers share a GPU
        (["a", ""], False),  # one computes on the CPU
        (["", ""], False),
    ],
)
def test_nccl_is_used_between_gpus_of_one_worker_each(gpus, can):
    assert can_use_nccl(gpus) == can


class FakeNccl:
    """Records its calls. The end of coalescing fills the buffers: a flag of nought, and two ones."""

    def __init__(self, *_):
        self.calls, self.buffers = [], []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name.strip("_"), *[arg for arg in args if not isinstance(arg, list)]))

    def recv(self, buffers, rank, tag):
        self.buffers.extend(buffers)
        self.calls.append(("recv", rank, tag))

    def _end_coalescing(self):
        self.calls.append(("end_coalescing",))
        for buffer in self.buffers:
            buffer.zero_()
            buffer[16:24] = torch.ones(2).view(torch.uint8)
        return self

    def wait(self):
        self.calls.append(("wait",))


def test_sends_and_receives_of_nccl_are_launched_together_and_waited_for_together():
    nccl = FakeNccl()
    sends = InFlightSends(lambda work: work.wait(None))
    backend = NcclGroup(nccl, torch.device("cpu"))
    group = ProcessGroup(0, (0, 1, 2), backend, sends, FailureTexts(lambda: None, 0), Counter(), lambda members: None)
    task = task_of(0, torch.zeros(2), over("x"), over("-", TRIO), dense((4,)))
    (result,) = group.begin([task]).finish()
    coalesced = [("start_coalescing",), ("send", 1, 0), ("send", 2, 0), ("recv", 1, 0), ("end_coalescing",)]
    assert nccl.calls == [*coalesced, ("wait",)]
    assert result.tolist() == [0.0, 0.0, 1.0, 1.0]
    sends.confirm(2)
    assert nccl.calls == [*coalesced, ("wait",), ("wait",)]
