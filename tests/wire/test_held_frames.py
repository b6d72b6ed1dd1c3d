"""The bytes of large uploads stay at the dispatcher until the worker asks for them, a few frames at a time."""

import pytest
import torch

import gt
from gt.core.errors import ProtocolError
from gt.wire.codec import CHUNK
from gt.wire.held_frames import HeldFrames, HeldFramesReader
from gt.worker.process import WorkerProcess


class Connection:
    """Both ends, without sockets. `most` is the largest number of frames that were on their way."""

    def __init__(self):
        self.held, self.sent, self.most, self.room = HeldFrames(), [], 0, 1 << 30
        self.reader = HeldFramesReader(self.allocate, self.ask, self.wait)

    def allocate(self, nbytes):
        if nbytes > self.room:
            raise MemoryError
        return memoryview(bytearray(nbytes))

    def ask(self, start, stop):
        message = self.held.take(start, stop)
        if message:
            self.sent.append(message)
        self.most = max(self.most, sum(len(message) - 2 for message in self.sent))

    def wait(self):
        assert self.reader.note(self.sent.pop(0))

    def hold(self, data):
        self.held.add([data[start : start + CHUNK] for start in range(0, len(data), CHUNK)])
        return self.reader.announce(len(data))


def content(number, nbytes):
    return bytes([number]) * nbytes


def test_uploads_are_read_in_order_with_few_frames_on_their_way():
    connection = Connection()
    sizes = [40 * CHUNK + 7, 1, 3 * CHUNK]
    uploads = [connection.hold(content(number, size)) for number, size in enumerate(sizes)]
    assert [bytes(upload.read()) for upload in uploads] == [content(*each) for each in enumerate(sizes)]
    assert connection.most <= 16
    assert connection.held.nbytes == 0


def test_an_upload_without_memory_is_dropped_and_the_next_one_is_read():
    connection = Connection()
    first, second = connection.hold(content(1, 9 * CHUNK)), connection.hold(content(2, 2 * CHUNK))
    connection.room = 8 * CHUNK
    with pytest.raises(MemoryError):
        first.read()
    assert not connection.sent, "nothing is asked for without memory"
    assert bytes(second.read()) == content(2, 2 * CHUNK)
    third = connection.hold(content(3, CHUNK))
    connection.reader.drop_rest()
    assert connection.held.nbytes == 0
    with pytest.raises(ProtocolError, match="frames 11 to 12 are asked for, and 12 to 12 are held"):
        third.read()


def test_frames_of_an_interrupted_read_are_not_those_of_the_next():
    connection = Connection()
    first, second = connection.hold(content(1, 9 * CHUNK)), connection.hold(content(2, 9 * CHUNK))
    connection.reader._wait = lambda: (_ for _ in ()).throw(ConnectionError)
    with pytest.raises(ConnectionError):
        first.read()
    connection.reader._wait = connection.wait
    assert bytes(second.read()) == content(2, 9 * CHUNK)


def test_a_message_with_a_header_is_none_of_held_frames():
    assert not Connection().reader.note([b"GT and so on"])


def test_a_worker_does_not_wait_once_its_frames_have_come(tmp_path):
    class Arrived:
        """A connection over which one message has come. A wait for another one lasts half a second."""

        def __init__(self):
            self.messages = [[b"", bytes(8), b"bytes"]]

        def receive(self, *, waits=True):
            assert self.messages or not waits, "it waits for more"
            return self.messages.pop() if self.messages else None

        def is_lost(self):
            return False

        def close(self):
            pass

    worker = WorkerProcess(f"ipc://{tmp_path}/server", "pytorch", "cpu")
    worker._link = Arrived()
    worker._await_frames()
    assert worker._held._next(0) == b"bytes"
    worker.close()


def test_uploads_in_messages_keep_their_order_and_are_those_of_their_time(monkeypatch):
    """A program may write to a plain tensor after its upload."""
    monkeypatch.setenv("GT_TRANSPORT", "gloo")
    gt.init(workers=2)
    mesh = gt.mesh((2,), ("x",))
    plain = torch.arange(1 << 20).view(2, -1)
    made = []
    for _ in range(4):
        cut, copied = gt.distribute(plain, mesh, "x, -"), gt.distribute(plain, mesh, "-, -")
        made.append((gt.to(plain), cut, copied, plain.clone()))
        plain += 1
    for *uploads, expected in made:
        for upload in uploads:
            assert torch.equal(upload.cpu(), expected)
    gt.shutdown()
