"""Reports of commands that fail: the same failure has the same origin on all workers."""

import pytest

from gt.core.messages import (
    ByteRange,
    DefineOp,
    Failed,
    OpFailed,
    QueryOp,
    ReadVersions,
    RunOp,
    Synchronize,
    Synchronized,
    Versions,
    WorkerAgreeOnStep,
    WorkerCreateTensor,
    WorkerFetchTensor,
)
from gt.core.meta import TensorMeta
from gt.worker.engines import PyTorchEngine
from gt.worker.exchange import InProcessExchange
from gt.worker.executor import Executor
from gt.worker.failed_value import FailedValue
from tests.records import ADD, ADD_, SMALL, meta, own, signature

OP, A, B, C, D, REQUEST = own(100), *map(own, range(1, 5)), own(50)
SITE, OTHER = 9, 10


def worker(number, op=ADD):
    """An executor that holds A and B, which cannot be added."""
    executor = Executor(number, PyTorchEngine("cpu"), InProcessExchange(), None, owns_buffers=False)
    shapes = {A: SMALL, B: meta(3)}
    creates = [WorkerCreateTensor(ident, shape, ByteRange("", 0), SITE) for ident, shape in shapes.items()]
    assert executor.run([DefineOp(OP, op), *creates], [bytearray(shape.nbytes) for shape in shapes.values()]) == []
    return executor


def reports_of(executor, *commands, buffers=()):
    return [report for report, _ in executor.run(commands, buffers)]


@pytest.mark.parametrize("op", [ADD, ADD_], ids=["a result", "a write"])
def test_the_origin_of_a_failed_op_is_the_id_of_its_output(op):
    origins = set()
    for number in range(2):
        executor = worker(number, op)
        (report,) = reports_of(executor, RunOp(OP, (A, B), (C,), (), 0, SITE))
        (answer,) = reports_of(executor, WorkerFetchTensor(REQUEST, C, False))
        assert (type(report), type(answer)) == (OpFailed, Failed) and report.failure == answer.failure
        assert (report.session, report.failure.worker, report.failure.site) == (1, number, SITE)
        origins.add(report.failure.origin)
    assert origins == {C}


def test_dependents_of_a_failure_have_its_origin():
    executor = worker(0)
    (report,) = reports_of(executor, RunOp(OP, (A, B), (C,), (), 0, SITE), RunOp(OP, (A, C), (D,), (), 0, OTHER))
    assert reports_of(executor, WorkerFetchTensor(REQUEST, D, False)) == [Failed(REQUEST, report.failure)]


def test_the_same_op_fails_anew_each_time():
    executor = worker(0)
    reports = reports_of(executor, *[RunOp(OP, (A, B), (ident,), (), 0, SITE) for ident in (C, D)])
    assert [report.failure.origin for report in reports] == [C, D]


def test_the_origin_of_a_failed_query_is_its_request():
    executor = worker(0, signature("aten.add.Tensor", 2))
    (answer,) = reports_of(executor, QueryOp(REQUEST, OP, (A, B), (), C, (), 0, SITE))
    assert isinstance(answer, Failed) and (answer.is_own_failure, answer.failure.origin) == (True, REQUEST)


def test_a_query_that_has_no_memory_to_begin_is_answered_once_and_leaves_its_tensors(monkeypatch):
    def fail(value):
        raise MemoryError

    executor = worker(0, ADD_)
    held = {C: executor.tensors[A], B: executor.tensors[B]}
    monkeypatch.setattr(executor.engine, "resizable", fail)
    (answer,) = reports_of(executor, QueryOp(REQUEST, OP, (A, B), (C,), D, (), 0, SITE))
    assert isinstance(answer, Failed)
    assert executor.tensors == held, "written under its new id"


def test_the_origin_of_a_failed_upload_is_its_tensor():
    executor = worker(0)
    (report,) = reports_of(executor, WorkerCreateTensor(C, meta(9), ByteRange("", 0), SITE), buffers=[bytearray(2)])
    assert isinstance(report, OpFailed) and (report.failure.op, report.failure.origin) == ("upload", C)


def test_an_upload_that_is_refused_leaves_the_next_one_its_own_bytes():
    """Both travel in one message."""
    executor = Executor(0, PyTorchEngine("cpu"), InProcessExchange(), None, owns_buffers=True, memory=1 << 20)
    large, small = [bytes([number]) * count for number, count in enumerate((1 << 22, 4), 1)]
    sizes = [TensorMeta((len(data),), (1,), 0, "uint8") for data in (large, small)]
    creates = [
        WorkerCreateTensor(own(ident), size, ByteRange("", size.nbytes), 0) for ident, size in enumerate(sizes, 1)
    ]
    ((report, _),) = executor.run(creates, [large, small])
    assert report.failure.kind == "LimitError"
    assert executor.tensors[own(2)].tolist() == [2] * 4


def test_a_command_that_makes_no_sense_to_a_worker_fails_and_the_next_ones_run():
    executor = Executor(0, PyTorchEngine("cpu"), InProcessExchange(), None, owns_buffers=True)
    commands = [
        RunOp(own(9), (own(1),), (own(2),), (), 0, 5),  # of an op that was never defined
        WorkerAgreeOnStep(own(3), own(4)),  # on a step that never began
        ReadVersions(own(7), (own(2),)),
        Synchronize(own(8)),
    ]
    reports = [report for report, _ in executor.run(commands, [])]
    assert [type(report) for report in reports] == [OpFailed, OpFailed, Versions, Synchronized]
    assert (reports[0].failure.site, reports[0].failure.origin) == (5, own(2))
    assert isinstance(executor.tensors[own(2)], FailedValue)
