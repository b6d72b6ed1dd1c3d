"""Nothing that a peer sends ends the server: it serves others too."""

import os

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gt.core.messages import (
    Command,
    CreateTensor,
    DefineOp,
    FetchTensor,
    Goodbye,
    Hello,
    Located,
    LocateTensor,
    Redistribute,
    Refused,
    Rejected,
    RunOp,
    Synchronize,
    Welcome,
    WorkerSynchronize,
)
from gt.core.signatures import SpecRecord
from gt.dispatcher.server import Server
from gt.version import __version__
from gt.wire.codec import Decoder, encode, header_of
from gt.wire.processes import this_host
from tests.desks import alone, at
from tests.records import INLINE, RICH, SMALL, own, signature


class RecordingServer(Server):
    """`sent` is what would have gone to each peer."""

    def __init__(self):
        super().__init__("tcp://127.0.0.1:*")
        self.sent = []

    def _post(self, identity, messages, payloads=()):
        self.sent += [(identity, message) for message in messages]

    def hear(self, identity, *messages, payloads=()):
        self.sent.clear()
        self._receive(identity, encode(messages, payloads))
        return [message for to, message in self.sent if to == identity]


def hello(role, **fields):
    return Hello(__version__, role, this_host(), os.getpid(), **fields)


@pytest.fixture
def server():
    server = RecordingServer()
    server.hear(b"worker", hello("worker"))
    (welcome,) = server.hear(b"client", hello("client"))
    assert isinstance(welcome, Welcome) and welcome.ident == 1
    yield server
    server._close()


def decoded(message):
    """What goes to several workers is encoded once."""
    return Decoder(Command).decode(encode([message]))[0][0]


def test_the_server_serves(server):
    server.hear(b"client", CreateTensor(own(1), SMALL, INLINE, 0, 0), payloads=[[bytes(16)]])
    assert server.hear(b"client", LocateTensor(own(2), own(1))) == [Located(own(2), at(0).record())]


def test_a_command_for_several_workers_reaches_each_of_them(server):
    server.hear(b"another", hello("worker"))
    server.hear(b"client", Synchronize(own(9)))
    sent = [(to, decoded(message)) for to, message in server.sent]
    assert sent == [(to, WorkerSynchronize(own(9))) for to in (b"worker", b"another")]


GREETINGS = {
    "nothing": encode([]),
    "no hello": encode([Synchronize(own(1))]),
    "an unknown role": encode([hello("spectator")]),
    "noise": [b"GET / HTTP/1.1"],
    "no frames": [],
    "a progress cell that is not there": encode([hello("worker", progress="gt-1-1-0123456789abcdef")]),
    "a progress cell elsewhere": encode([hello("worker", progress="../../etc/passwd")]),
}


@pytest.mark.parametrize("frames", GREETINGS.values(), ids=GREETINGS.keys())
def test_a_stranger_is_refused(server, frames):
    server.sent.clear()
    server._receive(b"stranger", frames)
    assert [type(message) for _, message in server.sent] == [Refused]
    assert len(server.office.state.workers) == 1


BATCHES = {
    "nothing": encode([]),
    "another session's tensor": encode([FetchTensor(own(1), own(1, 2))]),
    "noise": [header_of(b"\xc1") + b"\xc1"],
    "no header": [b"", b""],
    "missing bytes": encode([CreateTensor(own(1), SMALL, INLINE, 0, 0)]),
    "an unknown op": encode([RunOp(own(1), (), (), (), 0, 0)]),
    "a layout of nothing": encode([Redistribute(own(1), own(2), SpecRecord(alone(0).record(), (("y",),)), 0)]),
    "an op that makes no sense": encode([DefineOp(own(1), RICH), RunOp(own(1), (own(2),), (own(3),), (), 0, 0)]),
    "more after a goodbye": encode([Goodbye(), Synchronize(own(1))]),
    "a hello again": encode([hello("client")]),
}


@pytest.mark.parametrize("frames", BATCHES.values(), ids=BATCHES.keys())
def test_a_clients_mistake_is_its_own(server, frames):
    server.hear(b"other", hello("client"))
    for _ in range(2):
        server._receive(b"client", frames)
    server._receive(b"client", encode([Synchronize(own(9))]))
    server.hear(b"other", CreateTensor(own(1, 2), SMALL, INLINE, 0, 0), payloads=[[bytes(16)]])
    assert server.hear(b"other", LocateTensor(own(2, 2), own(1, 2))) == [Located(own(2, 2), at(0).record())]


def test_a_mistake_of_ours_is_told_to_the_client_and_to_nobody_else(server, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("in a rule")

    monkeypatch.setattr("gt.dispatcher.plans.plan_op", fail)
    server.hear(b"client", CreateTensor(own(1), SMALL, INLINE, 0, 0), payloads=[[bytes(16)]])
    batch = [
        DefineOp(own(2), signature("aten.relu.default", 1, (SMALL,))),
        RunOp(own(2), (own(1),), (own(3),), (), 0, 0),
    ]
    (answer,) = server.hear(b"client", *batch)
    assert isinstance(answer, Rejected) and "ZeroDivisionError: in a rule" in answer.reason
    assert "an instruction of client 1 failed" in caplog.text and "Traceback" in caplog.text
    assert server.hear(b"client", LocateTensor(own(4), own(1))) == [Located(own(4), at(0).record())]


def test_a_peer_that_keeps_sending_noise_is_no_longer_heard(server):
    for _ in range(3):
        server._receive(b"client", [header_of(b"\xc1") + b"\xc1"])
    assert server.hear(b"client", Synchronize(own(1))) == []


@pytest.mark.parametrize("workers", [0, -1])
def test_a_client_that_wants_no_workers_is_refused_or_served(workers):
    server = RecordingServer()
    try:
        server.hear(b"client", hello("client", wants_workers=workers))
        server.hear(b"client", CreateTensor(own(1), SMALL, INLINE, 0, 0), payloads=[[bytes(16)]])
        server.hear(b"client", Synchronize(own(2)))
    finally:
        server._close()


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 40), 1 << 42)
    | st.floats()
    | st.sampled_from(["RunOp", "Goodbye", ""]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=JUNK, who=st.sampled_from([b"client", b"worker", b"stranger"]))
def test_junk_is_survived(server, junk, who):
    for peer in server._peers.values():
        peer.mistakes = 0
    body = msgspec.msgpack.encode(junk)
    server._receive(who, [header_of(body) + body])
