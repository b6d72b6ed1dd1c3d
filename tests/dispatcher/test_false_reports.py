"""A worker with an unrequested or impossible report is dismissed, and no session gets the report."""

import contextlib

import pytest

from gt.core.errors import ProtocolError
from gt.core.messages import (
    RAN_AT_ONCE,
    ByteRange,
    Command,
    CreateTensor,
    Failed,
    Fetched,
    FetchTensor,
    Goodbye,
    Lost,
    OpFailed,
    Progress,
    Queried,
    Ran,
    ReadTimeline,
    ReadTraffic,
    Stats,
    StoreReady,
    Synchronized,
    TensorRead,
    TimelineReport,
    Traffic,
    Welcome,
    WorkerFetchTensor,
    WorkerShutdown,
    WorkerStats,
)
from gt.wire.codec import Decoder, encode
from gt.wire.connections import open_link
from gt.wire.socket_channel import SocketChannel
from tests.dispatcher.recording_server import hello
from tests.dispatcher_harness import REQUEST, A, harness_with
from tests.records import FAILURE, INLINE, SMALL, own
from tests.subprocesses import server_keys, serving, wait_until


@pytest.fixture(scope="module")
def endpoint():
    with serving() as port:
        yield f"tcp://127.0.0.1:{port}"


class Liar:
    """A worker that the test drives."""

    def __init__(self, endpoint):
        wait_until(lambda: self._open(endpoint), what="the server")
        self.link.send(encode([hello("worker")]))
        ((welcome, *_), _) = Decoder(Welcome).decode(self.link.receive())
        self.ident = welcome.ident

    def _open(self, endpoint):
        self.link = open_link(endpoint, server_keys(), 10_000, 0)
        return self.link is not None

    def hear(self, kind):
        """The next command of a kind."""
        while True:
            frames = self.link.receive()
            assert frames is not None, f"no {kind.__name__} came"
            for command in Decoder(Command).decode(frames)[0]:
                if isinstance(command, kind):
                    return command

    def close(self):
        self.link.close()


class Client:
    def __init__(self, endpoint):
        self.channel = SocketChannel(endpoint, None, server_keys(), 0)
        self.session = self.channel.greet(1, 20).ident
        self.heard = []

    def hear(self, kind):
        def has_come():
            self.heard += [received.answer for received in self.channel.receive()]
            return any(isinstance(answer, kind) for answer in self.heard)

        wait_until(has_come, what=kind.__name__)

    def close(self):
        self.channel.close()


@pytest.fixture
def scene(endpoint):
    """A lying worker with a tensor of one session, which waits for it, and none of another session."""
    with contextlib.ExitStack() as stack:
        liar = stack.enter_context(contextlib.closing(Liar(endpoint)))
        first = stack.enter_context(contextlib.closing(Client(endpoint)))
        other = stack.enter_context(contextlib.closing(Client(endpoint)))
        tensor, request = own(1, first.session), own(2, first.session)
        first.channel.send([CreateTensor(tensor, SMALL, INLINE, None, 0), FetchTensor(request, tensor)], [bytes(16)])
        assert liar.hear(WorkerFetchTensor).request == request
        yield liar, first, other, request


def failed(session, origin):
    return OpFailed(session, FAILURE.__class__(0, "aten.mm.default", (), 0, origin, "RuntimeError", "a lie", ""))


STATS = WorkerStats(0, 0, 0, {})
LIES = {
    "a read of another size": lambda request, other: Fetched(request, ByteRange("", 8)),
    "memory of another process": lambda request, other: Fetched(request, ByteRange("gt-1-1-1-0123456789abcdef", 16)),
    "a read again": lambda request, other: Fetched(request + 1, INLINE),
    "a read of another session": lambda request, other: Fetched(own(2, other), INLINE),
    "a query": lambda request, other: Queried(request + 1, (), ()),
    "a query in place of a read": lambda request, other: Queried(request, (), ()),
    "a failed request": lambda request, other: Failed(own(2, other), FAILURE),
    "a failed op of another session": lambda request, other: failed(other, own(1, other)),
    "a failed op of another session's tensor": lambda request, other: failed(request >> 40, own(1, other)),
    "a failed op of no session": lambda request, other: failed(1 << 20, 0),
    "an end of work": lambda request, other: Synchronized(own(2, other)),
    "traffic": lambda request, other: Traffic(own(2, other), {}),
    "stats": lambda request, other: Stats(own(2, other), STATS),
    "a timeline": lambda request, other: TimelineReport(own(2, other), (), 0),
    "a mark": lambda request, other: Progress(1 << 40, 1),
    "a store at no port": lambda request, other: StoreReady(0),
    "a store elsewhere": lambda request, other: StoreReady(1 << 20),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_worker_with_a_false_report_is_dismissed_and_the_report_is_dropped(scene, lie):
    liar, first, other, request = scene
    told = lie(request, other.session)
    payloads = [[bytes(told.byte_range.nbytes)]] if isinstance(told, Fetched) and not told.byte_range.name else []
    liar.link.send(encode([told], payloads or ([[]] if isinstance(told, Fetched) else ())))
    liar.hear(WorkerShutdown)
    for client in (first, other):
        client.hear(Lost)
    assert first.heard[0].request == request
    assert "was dismissed: its" in first.heard[-1].reason and "ProtocolError" in first.heard[-1].reason
    kinds = {type(answer) for answer in (*first.heard, *other.heard)}
    assert kinds == {Lost}


def test_a_read_that_is_answered_with_too_few_bytes_is_as_documented(scene, fault):
    liar, first, _, request = scene
    liar.link.send(encode([Fetched(request, ByteRange("", 8))], [[bytes(8)]]))
    first.hear(Lost)
    fault("a worker answers a read with too few bytes", "dismissed: " + first.heard[0].reason.partition("used ")[2])


def test_a_worker_may_leave(scene):
    liar, first, _, request = scene
    liar.link.send(encode([Goodbye("enough")]))
    first.hear(Lost)
    assert (first.heard[0].request, first.heard[0].reason) == (request, "left: enough")


def test_an_honest_answer_is_passed_on(scene):
    liar, first, other, request = scene
    liar.link.send(encode([failed(first.session, own(1, first.session)), Fetched(request, INLINE)], [[bytes(16)]]))
    first.hear(TensorRead)
    assert [type(answer) for answer in first.heard] == [OpFailed, TensorRead]
    other.channel.receive()
    assert other.heard == []


# Without sockets


def test_a_store_is_hosted_by_the_worker_that_was_asked():
    harness = harness_with(2)
    with pytest.raises(ProtocolError, match="worker 1 was not asked for a store"):
        harness.report(1, StoreReady(1234))
    store = harness.state.store
    assert harness.report(0, StoreReady(1234)) == [] and harness.state.store == store


def test_replies_to_a_session_that_has_ended_are_dropped():
    harness = harness_with()
    harness.tell(FetchTensor(REQUEST, A))
    harness.close()
    for report in (Fetched(REQUEST, INLINE), failed(1, A), Synchronized(REQUEST)):
        assert harness.report(0, report) == []


LONG = Ran("aten.mm.default", 0, "", 0, 1)


@pytest.mark.parametrize(
    ("asked", "report"),
    [
        (ReadTraffic(REQUEST, False), Traffic(REQUEST, dict.fromkeys(range(9), 1))),
        (ReadTimeline(REQUEST, 8), TimelineReport(REQUEST, (LONG,) * (RAN_AT_ONCE + 1), 0)),
    ],
    ids=["traffic", "timeline"],
)
def test_answers_that_are_longer_than_can_be_are_refused(asked, report):
    harness = harness_with()
    harness.tell(asked)
    with pytest.raises(ProtocolError):
        harness.report(0, report)
