"""Exchanges over a process group are begun by their command and finished when their tensors are needed."""

import threading

import pytest
import torch

from gt.core.ids import FIRST_DISPATCHER_ID, SESSION_SHIFT
from gt.core.messages import (
    DefineOp,
    FreeTensors,
    ReadStats,
    RunOp,
    RunProgram,
    Stats,
    Synchronize,
    WorkerDefineProgram,
    WorkerEndSession,
    WorkerFetchTensor,
)
from gt.core.meta import TensorMeta
from gt.dispatcher.planner import TensorMove, plan_moves
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec
from gt.worker.engines import make_engine
from gt.worker.executor import Executor
from gt.worker.failed_value import FailedValue, make_failure
from tests.records import ADD, define_program, own
from tests.worker.exchange.transports import exchanges, left

SOURCE, GATHER = own(1), own(90)
COPY = (1 << SESSION_SHIFT) + FIRST_DISPATCHER_ID + 5
PAIR = DeviceMesh([2], ["x"], [0, 1])
WHOLE = TensorMeta((4,), (1,), 0, "float32")
MOVE = TensorMove(WHOLE, parse_spec("x", PAIR), parse_spec("-", PAIR))
REDUCE, GRADIENTS = own(91), (own(2), own(3))
SUM = TensorMove(WHOLE, parse_spec("- + x", PAIR), parse_spec("-", PAIR))
ADDS = own(92)


@pytest.fixture(params=["gloo", "shared"])
def executors(request):
    with left(exchanges(2, request.param)) as found:
        yield [prepared(worker, exchange) for worker, exchange in enumerate(found)]


@pytest.fixture
def over_gloo():
    with left(exchanges(2, "gloo")) as found:
        yield [prepared(worker, exchange) for worker, exchange in enumerate(found)]


def prepared(worker, exchange):
    """An executor with this worker's half of 0, 1, 2, 3, and a program that gathers it."""
    executor = Executor(worker, make_engine("pytorch"), exchange, export, owns_buffers=True)
    executor.run([WorkerDefineProgram(GATHER, "redistribute", plan_moves([MOVE]).program)], [])
    executor.tensors[SOURCE] = torch.arange(2.0) + 2 * worker
    return executor


def export(nbytes, place, write):
    data = memoryview(bytearray(nbytes))
    write(data)
    return None, data


def gather(output=COPY):
    return RunOp(GATHER, (SOURCE,), (output,), (), 0, 0)


def run_all(executors, *batches):
    """Run a batch on each worker at the same time; returns their reports. With one batch, all run it."""
    reports = [None] * len(executors)

    def run(number):
        with torch.inference_mode():
            batch = batches[number] if len(batches) > 1 else batches[0]
            reports[number] = executors[number].run(batch, [])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(executors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return reports


def connect(executors):
    """The first gather makes the group, and is done at once."""
    run_all(executors, [gather(own(50)), FreeTensors((own(50),))])


def test_a_gather_arrives_when_it_is_needed(executors):
    connect(executors)
    run_all(executors, [gather()])
    is_over_gloo = executors[0].exchange.ways().get("gloo all-gather", 0) > 0
    assert [COPY in executor.tensors for executor in executors] == [not is_over_gloo] * 2
    run_all(executors, [RunOp(GATHER, (SOURCE,), (own(51),), (), 0, 0), Synchronize(own(80))])
    for executor in executors:
        assert executor.tensors[COPY].tolist() == [0, 1, 2, 3]


NEEDS = {
    "fetch": WorkerFetchTensor(own(80), COPY, 0, None),
    "synchronize": Synchronize(own(80)),
    "stats": ReadStats(own(80)),
}


@pytest.mark.parametrize("need", NEEDS.values(), ids=NEEDS)
def test_whoever_looks_at_a_tensor_finds_it(over_gloo, need):
    connect(over_gloo)
    reports = run_all(over_gloo, [gather(), need])
    for executor, reported in zip(over_gloo, reports, strict=True):
        assert executor.tensors[COPY].tolist() == [0, 1, 2, 3]
        stats = [report.stats for report, _ in reported if isinstance(report, Stats)]
        assert all(stat.tensors == 2 for stat in stats)


def test_only_copies_arrive_late(over_gloo):
    """A tensor of the client may be written right after the gather, and its source too."""
    connect(over_gloo)
    run_all(over_gloo, [gather(own(60))])
    assert all(own(60) in executor.tensors for executor in over_gloo)


@pytest.mark.parametrize("end", [FreeTensors((COPY,)), WorkerEndSession(1)], ids=["free", "end of session"])
def test_a_gather_that_nobody_needs_leaves_nothing(over_gloo, end):
    connect(over_gloo)
    run_all(over_gloo, [gather(), end])
    assert all(COPY not in executor.tensors for executor in over_gloo)
    assert not any(executor._runner.overlapped for executor in over_gloo)


def test_exchanges_in_between_get_their_own_values(over_gloo):
    connect(over_gloo)
    gathers = [gather(COPY + number) for number in range(6)]
    run_all(over_gloo, [*gathers, gather(own(61)), ReadStats(own(80))])
    for executor in over_gloo:
        assert [executor.tensors[COPY + number].tolist() for number in range(6)] == [[0, 1, 2, 3]] * 6


def test_a_member_without_its_value_fails_the_gather_of_all(over_gloo):
    connect(over_gloo)
    failure = make_failure(1, "aten.add", (), gather(), RuntimeError("of worker 1"))
    over_gloo[1].tensors[SOURCE] = FailedValue(failure)
    run_all(over_gloo, [gather(), Synchronize(own(80))])
    assert all(isinstance(executor.tensors[COPY], FailedValue) for executor in over_gloo)


def test_a_member_that_has_ended_fails_the_gather_when_it_is_needed(over_gloo):
    connect(over_gloo)
    first, second = over_gloo
    second.exchange.leave()
    first.exchange.lose_worker(1)
    reports = run_all([first], [gather(), Synchronize(own(80))])
    assert isinstance(first.tensors[COPY], FailedValue)
    assert [type(report).__name__ for report, _ in reports[0]] == ["OpFailed", "Synchronized"]


# Reductions


def with_gradients(executors):
    """Two gradients, whose sums over the workers are 10 and 30, and a program that reduces them."""
    connect(executors)
    program = plan_moves([SUM, SUM]).program
    run_all(executors, [WorkerDefineProgram(REDUCE, "redistribute", program), DefineOp(ADDS, ADD)])
    for worker, executor in enumerate(executors):
        for ident, value in zip(GRADIENTS, (5.0, 15.0), strict=True):
            executor.tensors[ident] = torch.full((4,), value + worker - 0.5)
    return RunOp(REDUCE, GRADIENTS, GRADIENTS, (), 0, 0)


def test_a_reduction_goes_on_until_a_gradient_is_needed(over_gloo):
    reduce = with_gradients(over_gloo)
    run_all(over_gloo, [reduce])
    assert all(executor._runner.overlapped and GRADIENTS[0] not in executor.tensors for executor in over_gloo)
    run_all(over_gloo, [RunOp(ADDS, GRADIENTS, (own(60),), (), 0, 0)])
    for executor in over_gloo:
        assert executor.tensors[own(60)].tolist() == [40.0] * 4
        assert executor.tensors[GRADIENTS[0]].tolist() == [10.0] * 4


@pytest.mark.parametrize("need", [FreeTensors(GRADIENTS), WorkerEndSession(1)], ids=["free", "end of session"])
def test_a_reduction_that_is_not_needed_leaves_nothing(over_gloo, need):
    reduce = with_gradients(over_gloo)
    run_all(over_gloo, [reduce, need])
    assert not any(executor._runner.overlapped for executor in over_gloo)
    assert all(executor.tensors.keys().isdisjoint(GRADIENTS) for executor in over_gloo)


def test_a_segment_waits_for_the_reduction_of_its_externals(over_gloo):
    reduce = with_gradients(over_gloo)
    program = define_program(own(93), (ADDS, (0, 1)), (ADDS, (2, 0)))
    run_all(over_gloo, [program, reduce, RunProgram(own(93), own(70), GRADIENTS, (), (2,))])
    for executor in over_gloo:
        assert executor.tensors[own(71)].tolist() == [50.0] * 4


def test_a_failed_gradient_fails_on_all_workers(over_gloo):
    reduce = with_gradients(over_gloo)
    failure = make_failure(1, "aten.mm.default", (), reduce, RuntimeError("no"))
    over_gloo[1].tensors[GRADIENTS[0]] = FailedValue(failure)
    run_all(over_gloo, [reduce, Synchronize(own(80))])
    for executor in over_gloo:
        assert isinstance(executor.tensors[GRADIENTS[0]], FailedValue)
        assert executor.tensors[GRADIENTS[1]].tolist() == [30.0] * 4
