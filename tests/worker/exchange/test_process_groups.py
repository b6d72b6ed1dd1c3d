"""Exchanges over process groups: which way a step goes, and the order of sends and receives."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from gt.sharding.spec import DeviceMesh
from gt.worker.exchange.deferred_failure_flags import DeferredFailureFlags
from gt.worker.exchange.failure_store import FailureStore
from gt.worker.exchange.group_backends import NcclGroup, can_use_nccl
from gt.worker.exchange.in_flight_sends import InFlightSends
from gt.worker.exchange.process_groups import ProcessGroup, work_of
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import dense, step_of, task_of

TRIO = DeviceMesh([3], ["x"], [0, 1, 2])
GRID = DeviceMesh([2, 2], ["a", "b"], [0, 1, 2, 3])
NATIVE = ("float32", "float64", "int32", "int64")
DTYPES = (*NATIVE, "float16", "bfloat16", "int8", "int16", "uint8", "bool", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "prod", "max", "min", "and", "or"])
def test_the_group_itself_reduces_only_sums_that_it_adds_as_gt_does(dtype, reduction):
    step = step_of(0, dense((6,), dtype), over(f"- + x:{reduction}"), over("-"))
    is_native = reduction == "sum" and dtype in NATIVE
    assert work_of(step).way == ("all-reduce" if is_native else "all-to-all and all-gather")


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
    assert work_of(step_of(0, dense(shape), source, target)).way == way


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
        self.calls.append(("stream waits",))


class FakeStream:
    """The communication stream of a GPU; its events are waited for by the computation."""

    def __init__(self, calls):
        self.calls = calls

    @contextmanager
    def following(self, launch):
        self.calls.append(("follow",))
        yield
        launch.event = self

    def use(self, *buffers):
        pass

    def wait(self):
        self.calls.append(("wait",))


def nccl_group(flags=None):
    nccl = FakeNccl()
    sends = InFlightSends(lambda work: work.wait(None))
    backend = NcclGroup(nccl, torch.device("cpu"), FakeStream(nccl.calls))
    failures = FailureStore(lambda: None, 0)
    return nccl, sends, ProcessGroup(0, (0, 1, 2), backend, sends, failures, Counter(), lambda members: None, flags)


def test_sends_and_receives_of_nccl_are_launched_together_and_waited_for_together():
    nccl, sends, group = nccl_group()
    task = task_of(0, torch.zeros(2), over("x"), over("-", TRIO), dense((4,)))
    (result,) = group.begin([task]).finish()
    sent = [("start_coalescing",), ("send", 1, 0), ("send", 2, 0), ("recv", 1, 0), ("end_coalescing",)]
    launched = [("follow",), *sent, ("stream waits",)]
    assert nccl.calls == [*launched, ("wait",)]
    assert result.tolist() == [0.0, 0.0, 1.0, 1.0]
    sends.confirm(2)
    assert nccl.calls == [*launched, ("wait",), ("wait",)]


def test_a_collective_of_nccl_runs_on_the_communication_stream():
    nccl, _, group = nccl_group()
    nccl.allreduce = lambda buffers: (nccl.calls.append(("allreduce",)), nccl)[1]
    task = task_of(0, torch.ones(2), over("- + x", TRIO), over("-", TRIO))
    (result,) = group.begin([task]).finish()
    assert nccl.calls == [("follow",), ("allreduce",), ("stream waits",), ("wait",)]
    assert result.tolist() == [1.0, 1.0]


def test_a_flag_on_the_device_is_kept_and_the_value_is_given():
    flags = DeferredFailureFlags(torch.device("cpu"), FailureStore(lambda: None, 0))
    nccl, _, group = nccl_group(flags)
    nccl.allreduce = lambda buffers: (buffers[0].add_(1), nccl)[1]  # another member's flag
    task = task_of(0, torch.ones(2), over("- + x", TRIO), over("-", TRIO))
    (result,) = group.begin([task]).finish()
    assert result.tolist() == [2.0, 2.0] and len(flags) == 1 and flags.doubt.item() == 1
