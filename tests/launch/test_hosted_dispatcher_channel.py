"""A dispatcher in the client's process: its answers are handed over, and its errors are raised in the client."""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gt
from gt.client import active_session
from gt.core.messages import (
    ByteRange,
    CreateTensor,
    Fetched,
    FetchTensor,
    LocateTensor,
    Lost,
    Rejected,
    Synchronize,
    Synchronized,
    TensorRead,
    Waiting,
)
from gt.wire import shared_memory
from gt.wire.client_channel import Received
from gt.wire.lifeline import clear_up, note_processes
from gt.wire.payloads import Payloads
from gt.wire.shared_memory import AttachedBuffers
from tests.dispatcher.recording_server import RecordingServer, hello
from tests.records import INLINE, SMALL, own
from tests.subprocesses import wait_until


@pytest.fixture
def server():
    """A server that hosts a session and has a worker; `heard` are the answers of the session."""
    server = RecordingServer()
    server.hear(b"worker", hello("worker"))
    server.heard = []
    server.welcome = server.open_local_session(lambda answer, payload: server.heard.append((answer, payload)))
    yield server
    server.close()


def test_the_session_is_welcomed_as_a_client_is(server):
    assert (server.welcome.ident, server.welcome.pid) == (1, os.getpid())
    assert [worker.worker for worker in server.welcome.workers] == [0]


def test_answers_are_handed_over_and_not_sent(server):
    server.sent.clear()
    server.client_messages.instruct(1, [CreateTensor(own(1), SMALL, INLINE, None, 0)], [[bytes(16)]])
    server.client_messages.instruct(1, [LocateTensor(own(2), own(1)), Synchronize(own(3))], [])
    assert [to for to, _ in server.sent] == [b"worker", b"worker"]
    server.hear(b"worker", Synchronized(own(3)))
    assert [type(answer).__name__ for answer, _ in server.heard] == ["Located", "Synchronized"]
    assert not any(to == b"client" for to, _ in server.sent)


def test_the_bytes_of_an_answer_are_handed_over(server):
    server.client_messages.instruct(1, [CreateTensor(own(1), SMALL, INLINE, None, 0)], [[bytes(16)]])
    server.client_messages.instruct(1, [FetchTensor(own(2), own(1))], [])
    server.hear(b"worker", Fetched(own(2), ByteRange("", 16)), payloads=[[bytes(range(16))]])
    ((answer, carried),) = server.heard
    assert Payloads(None).unpack(answer, carried) == Received(answer, [bytes(range(16))])


def test_other_clients_can_join_and_get_their_own_answers(server):
    server.hear(b"client", hello("client"))
    server.hear(b"client", Synchronize(own(1, session=2)))
    server.hear(b"worker", Synchronized(own(1, session=2)))
    assert server.heard == []


def test_the_session_gets_the_reason_of_a_wait(server):
    server.client_messages.instruct(1, [Synchronize(own(1))], [])
    server.activity.explain_waits()
    assert [answer for answer, _ in server.heard] == [Waiting("for worker 0, which is at its start")]


def test_a_lost_worker_is_told_to_the_session(server):
    server.client_messages.instruct(1, [Synchronize(own(1))], [])
    server.lose_peer(b"worker")
    assert {answer.request for answer, _ in server.heard if isinstance(answer, Lost)} == {own(1), 0}


def test_an_error_of_gt_is_an_error_of_the_session(server, monkeypatch):
    monkeypatch.setattr(server.dispatcher, "instruct", lambda *_: 1 / 0)
    server.client_messages.instruct(1, [Synchronize(own(1))], [])
    assert server.heard == [(Rejected(0, "a mistake of GT: ZeroDivisionError: division by zero"), ())]


# Bytes of tensors


def copy_bytes(target, source):
    target[:] = source


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    return tmp_path


def upload(nbytes):
    return CreateTensor(own(1), SMALL, ByteRange("", nbytes), None, 0)


def test_large_tensors_are_shared_and_small_ones_are_not(directory):
    large, small = bytes(shared_memory.SHARE_BYTES), bytes(8)
    with contextlib.closing(Payloads(copy_bytes)) as payloads:
        packed, carried = payloads.pack([upload(len(large)), Synchronize(own(2)), upload(8)], [large, small])
        assert [bool(packed[0].byte_range.name), packed[1], packed[2]] == [True, Synchronize(own(2)), upload(8)]
        assert carried == [[], [small]]
        assert bytes(AttachedBuffers().view(packed[0].byte_range.name, 0, len(large))) == large
    assert list(directory.iterdir()) == []


def test_nothing_is_shared_with_workers_elsewhere(directory):
    large = bytes(shared_memory.SHARE_BYTES)
    assert Payloads(None).pack([upload(len(large))], [large]) == ([upload(len(large))], [[large]])
    assert list(directory.iterdir()) == []


def test_bytes_travel_in_the_message_when_shared_memory_is_full(directory, monkeypatch, caplog, fault):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "create", full)
    large = bytes(shared_memory.SHARE_BYTES)
    payloads = Payloads(copy_bytes)
    fetch = FetchTensor(own(2), own(1), place=ByteRange("", len(large)))
    for _ in range(2):
        packed, carried = payloads.pack([upload(len(large)), fetch], [large])
        assert (packed, carried) == ([upload(len(large)), FetchTensor(own(2), own(1))], [[large]])
    assert [record.message.count("No space left") for record in caplog.records] == [1], "it is said once"
    fault("`/dev/shm` is full", "tensors go with the messages")


def test_bytes_that_are_elsewhere_are_the_failure_of_one_request(directory):
    with contextlib.closing(Payloads(copy_bytes)) as payloads:
        (fetch,), _ = payloads.pack([FetchTensor(own(1), own(5), place=ByteRange("", shared_memory.SHARE_BYTES))], [])
        for byte_range in (ByteRange("gt-1-1-1-0123456789abcdef", 8), ByteRange(fetch.place.name, 1 << 30)):
            received = payloads.unpack(TensorRead(own(1), (byte_range,)), [[]])
            assert (type(received.answer), received.answer.request, received.buffers) == (Rejected, own(1), ())
            assert "was not given for request" in received.answer.reason
        assert payloads.unpack(Synchronized(own(2)), ()) == Received(Synchronized(own(2)))


# Ends and losses


def test_new_tensors_go_to_the_workers_that_are_left():
    """Also where the client has read nothing since one died."""
    gt.init(workers=2)
    try:
        kept = [gt.to(torch.ones(3)) for _ in range(2)]
        assert [tensor.sum().item() for tensor in kept] == [3, 3]
        os.kill(active_session.current().welcome.workers[1].pid, signal.SIGKILL)
        server = active_session.current().channel._server
        dispatcher = server.dispatcher
        wait_until(lambda: not server.turn(waits=False) and len(dispatcher.ready_workers()) == 1, what="the loss")
        new = [gt.to(torch.ones(3)) + number for number in range(10)]
        assert [tensor.sum().item() for tensor in new] == [3 * number + 3 for number in range(10)]
    finally:
        gt.shutdown()


def test_a_directory_whose_name_is_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    os.mkdir(tmp_path / ("long" * 30))
    with pytest.raises(gt.SessionError, match="TMPDIR"):
        gt.init(workers=1)


def test_the_first_process_to_end_removes_the_shared_buffers_of_all(directory, tmp_path_factory):
    """Also for those that were killed and could not."""
    family = tmp_path_factory.mktemp("family")
    note_processes(family, [111, 222])
    for pid in (111, 222, 333, os.getpid()):
        (directory / f"gt-{pid}-1-0-0123456789abcdef").touch()
    clear_up(family)
    assert [path.name.split("-")[1] for path in directory.iterdir()] == ["333"]
    assert not family.exists()
    (directory / f"gt-{os.getpid()}-1-1-0123456789abcdef").touch()
    clear_up(family)
    assert [path.name.split("-")[1] for path in directory.iterdir()] == ["333"]


def test_workers_that_take_too_long_to_start_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif 'gt.worker' in ' '.join(sys.orig_argv): time.sleep(30)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GT_TIMEOUT", "1")
    begun = time.monotonic()
    gt.init(workers=2)
    with pytest.raises(gt.WorkerLost, match="after 1 s of waiting: 0 of 2 workers are ready"):
        gt.synchronize()
    assert time.monotonic() - begun < 20


def test_a_session_that_is_closed_while_a_thread_waits_tells_it(monkeypatch):
    monkeypatch.setattr("gt.client.session.FAREWELL_SECONDS", 0.0)
    gt.init(workers=1)
    session = active_session.current()
    x = gt.randn(1500, 1500)
    for _ in range(100):
        x = (x @ x) * 1e-3
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(x.sum().item)
        wait_until(lambda: session.inbox._receiving, what="the thread that reads")
        gt.shutdown()
        with pytest.raises(gt.SessionError, match="closed while another thread used it"):
            reading.result(timeout=20)


def test_a_closed_channel_refuses_messages():
    gt.init(workers=1)
    channel = active_session.current().channel
    gt.shutdown()
    with pytest.raises(gt.SessionError, match="closed"):
        channel.send([Synchronize(own(1))], [])
