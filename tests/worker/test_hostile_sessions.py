"""No command of one session ends a worker, which serves other sessions too."""

import pytest
import zmq

from gt.core.messages import (
    ByteRange,
    DefineOp,
    Failed,
    Fetched,
    OpFailed,
    Queried,
    QueryOp,
    Report,
    RunOp,
    Synchronize,
    Synchronized,
    Uploaded,
    WorkerCreateTensor,
    WorkerFetchTensor,
    WorkerHostStore,
    WorkerJoinStore,
)
from gt.core.signatures import Input, ListArg, Signature
from gt.wire import shared_memory
from gt.wire.codec import Decoder, encode, join
from gt.wire.connections import open_link
from gt.worker.engines import PyTorchEngine
from gt.worker.exchange.in_process_exchange import InProcessExchange
from gt.worker.executor import Executor
from gt.worker.failed_value import FailedValue
from gt.worker.process import WorkerProcess
from tests.records import SMALL, meta, own, signature

OP, A, B, C, D, REQUEST = own(100), *map(own, range(1, 5)), own(50)
BIG = meta(1 << 17)  # of a size that is shared


class WorkerHarness:
    """A worker whose dispatcher is the test: `send` gives it a batch, and returns its reports."""

    def __init__(self, directory):
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVTIMEO, 10_000)
        self._router.bind(f"ipc://{directory}/server")
        self._worker = WorkerProcess(f"ipc://{directory}/server", "pytorch", "cpu")
        self._worker._link = open_link(f"ipc://{directory}/server", directory, 0, 0)
        self.exchange = InProcessExchange()
        self.executor = Executor(0, PyTorchEngine("cpu"), self.exchange, self._worker._export, owns_buffers=True)

    def send(self, *commands, payloads=()):
        self._worker._run_batch(self.executor, encode([*commands, Synchronize(0)], payloads))
        reports, payloads = Decoder(Report).decode(self._router.recv_multipart()[1:])
        self.bytes = [join(payload) for payload in payloads]
        assert reports.pop() == Synchronized(0)
        return reports

    def close(self):
        self._worker.close()
        self._router.close(linger=0)
        self._context.term()


@pytest.fixture
def worker(tmp_path):
    worker = WorkerHarness(tmp_path)
    yield worker
    worker.close()


def create(ident, shape=SMALL, name="", nbytes=16):
    return WorkerCreateTensor(ident, shape, ByteRange(name, nbytes), 0)


def run(inputs, outputs):
    return RunOp(OP, inputs, outputs, (), 0, 0)


@pytest.mark.parametrize(
    ("name", "nbytes"), [("gt-1-1-1-0123456789abcdef", 16), ("gt-1-1-1-0123456789abcdef", 0), ("x", 16)]
)
def test_a_shared_buffer_that_is_gone_is_a_failure_of_its_tensor_only(worker, name, nbytes):
    report, uploaded = worker.send(create(A, SMALL, name, nbytes), create(B), payloads=[[], [bytes(16)]])
    assert isinstance(report, OpFailed) and (report.failure.op, report.failure.origin) == ("upload", A)
    assert uploaded == Uploaded(A), "the client gets its memory back"
    assert [type(report) for report in worker.send(WorkerFetchTensor(1, A), WorkerFetchTensor(2, B))] == [
        Failed,
        Fetched,
    ]


def test_an_empty_shared_buffer_is_a_failure_of_its_tensor(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    (tmp_path / "gt-1-1-1-0123456789abcdef").touch()
    report, _ = worker.send(create(A, SMALL, "gt-1-1-1-0123456789abcdef"))
    assert report.failure.kind == "ProtocolError" and "cannot be mapped" in report.failure.message


def test_a_tensor_is_written_to_the_clients_memory(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    name, data = shared_memory.create(BIG.nbytes + 8)
    content = bytes(range(256)) * (BIG.nbytes // 256)
    worker.send(create(A, BIG, nbytes=BIG.nbytes), payloads=[[content]])
    place = ByteRange(name, BIG.nbytes, 8)
    assert worker.send(WorkerFetchTensor(REQUEST, A, place=place)) == [Fetched(REQUEST, place)]
    assert bytes(data) == bytes(8) + content


@pytest.mark.parametrize("gone", [ByteRange("gt-1-1-1-0123456789abcdef", BIG.nbytes), ByteRange("x", BIG.nbytes)])
def test_bytes_travel_in_the_message_when_the_clients_memory_is_gone(worker, gone):
    content = bytes(range(256)) * (BIG.nbytes // 256)
    worker.send(create(A, BIG, nbytes=BIG.nbytes), payloads=[[content]])
    assert worker.send(WorkerFetchTensor(REQUEST, A, place=gone)) == [Fetched(REQUEST, ByteRange("", BIG.nbytes))]
    assert worker.bytes == [content]


def test_a_tensor_that_cannot_be_read_fails_its_request_and_leaves_no_shared_buffer(worker, tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("no room on the device")

    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path / "byte_ranges")
    (tmp_path / "byte_ranges").mkdir()
    worker.send(create(A, BIG, nbytes=BIG.nbytes), payloads=[[bytes(BIG.nbytes)]])
    monkeypatch.setattr(worker.executor.engine, "read_into", fail)
    (answer,) = worker.send(WorkerFetchTensor(REQUEST, A))
    failure = answer.failure
    assert isinstance(answer, Failed) and answer.is_own_failure
    assert (failure.op, failure.origin, failure.kind) == ("fetch", REQUEST, "LimitError")
    assert list((tmp_path / "byte_ranges").iterdir()) == []


def test_fetching_an_unknown_tensor_fails(worker):
    (answer,) = worker.send(WorkerFetchTensor(REQUEST, A))
    assert (answer.failure.op, answer.failure.kind) == ("fetch", "KeyError")


def test_an_op_on_an_unknown_tensor_fails(worker):
    (report,) = worker.send(DefineOp(OP, signature("aten.relu.default", 1, (SMALL,))), run((A,), (B,)))
    assert (report.failure.origin, report.failure.kind) == (B, "KeyError")


def test_a_query_of_an_unknown_tensor_fails(worker):
    op = DefineOp(OP, signature("aten.nonzero.default", 1))
    (answer,) = worker.send(op, QueryOp(REQUEST, OP, (A,), (), C, (), 0, 0))
    assert isinstance(answer, Failed) and (answer.is_own_failure, answer.failure.kind) == (True, "KeyError")


TWICE = Signature("aten._foreach_neg_.default", (ListArg((Input(0), Input(1))),), {}, ((), ()), (0, 1), (), ())


def test_a_tensor_that_is_written_at_two_positions_has_two_versions(worker):
    worker.send(DefineOp(OP, TWICE), create(A), payloads=[[bytes(16)]])
    worker.send(run((A, A), (B, C)))
    assert worker.executor.tensors[B] is worker.executor.tensors[C]


def test_a_query_that_writes_a_tensor_at_two_positions_is_answered(worker):
    worker.send(DefineOp(OP, TWICE), create(A), payloads=[[bytes(16)]])
    (answer,) = worker.send(QueryOp(REQUEST, OP, (A, A), (B, C), D, (), 0, 0))
    assert isinstance(answer, Queried) and answer.written == (SMALL, SMALL)


def test_a_store_that_cannot_be_joined_or_hosted_is_reported_and_work_goes_on(worker, monkeypatch, caplog):
    def refuse(*_):
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(worker.exchange, "join_store", refuse)
    monkeypatch.setattr(worker.exchange, "host_store", refuse)
    assert worker.send(WorkerJoinStore("127.0.0.1", 1, 0), WorkerHostStore(), create(A), payloads=[[bytes(16)]]) == []
    assert "cannot join the store at 127.0.0.1:1: nobody is there" in caplog.text and "cannot host" in caplog.text
    assert not isinstance(worker.executor.tensors[A], FailedValue)
