"""No message of a peer ends the server, which serves others too."""

import math
import os
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gt.core.ids import MAX_RESULTS
from gt.core.messages import (
    Command,
    CreateTensor,
    DefineOp,
    DefineSite,
    EndSession,
    Failed,
    FetchTensor,
    Goodbye,
    Located,
    LocateTensor,
    Lost,
    OpFailed,
    PublishTensor,
    Queried,
    QueryOp,
    ReadSessions,
    ReadStory,
    ReadWorkers,
    Redistribute,
    Refused,
    Rejected,
    Resume,
    RunOp,
    SessionsRead,
    StoreReady,
    SubscribeTensor,
    Synchronize,
    Synchronized,
    Waiting,
    Welcome,
    WorkerCreateTensor,
    WorkerShutdown,
)
from gt.core.signatures import MAX_TEXT, SpecRecord
from gt.dispatcher import backpressure
from gt.dispatcher.message_queue import ToWorkers
from gt.dispatcher.worker_activity import MAX_DESCRIBED
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.codec import Decoder, encode, header_of, join
from tests.dispatcher.recording_server import RecordingServer, hello
from tests.dispatcher_harness import at, solo_mesh
from tests.records import INLINE, NONZERO, RICH, SMALL, ZEROS, own, signature


@pytest.fixture
def server():
    server = RecordingServer()
    server.hear(b"worker", hello("worker"))
    (welcome,) = server.hear(b"client", hello("client"))
    assert isinstance(welcome, Welcome) and welcome.ident == 1
    yield server
    server.close()


@pytest.fixture
def server_without_workers():
    server = RecordingServer()
    yield server
    server.close()


def test_a_worker_that_names_a_stopped_process_as_its_own_does_not_end_it(server):
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        victim.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(victim.pid, os.WUNTRACED)[1])
        server.hear(b"liar", hello("worker", pid=victim.pid))
        server.departures.note_connection_end(b"liar")
        server._check_all(0.0)
        assert b"liar" not in server.peers.by_identity
        assert psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED
    finally:
        victim.kill()
        victim.wait()


def decoded(message):
    """A command for several workers is encoded once."""
    return Decoder(Command).decode(encode([message]))[0][0]


def test_the_server_answers(server):
    server.hear(b"client", CreateTensor(own(1), SMALL, INLINE, None, 0), payloads=[[bytes(16)]])
    assert server.hear(b"client", LocateTensor(own(2), own(1))) == [Located(own(2), at(0).record())]


def test_a_command_for_several_workers_reaches_each_of_them(server):
    server.hear(b"another", hello("worker"))
    server.hear(b"client", Synchronize(own(9)))
    sent = [(to, decoded(message)) for to, message in server.sent]
    assert sent == [(to, Synchronize(own(9))) for to in (b"worker", b"another")]


GREETINGS = {
    "nothing": encode([]),
    "no hello": encode([Synchronize(own(1))]),
    "an unknown role": encode([hello("spectator")]),
    "noise": [b"GET / HTTP/1.1"],
    "no frames": [],
    "a progress cell that is not there": encode([hello("worker", progress="gt-1-1-1-0123456789abcdef")]),
    "a progress cell of another process": encode([hello("worker", progress=f"gt-{os.getpid()}1-1-1-0123456789abcdef")]),
    "a progress cell elsewhere": encode([hello("worker", progress="../../etc/passwd")]),
}


@pytest.mark.parametrize("frames", GREETINGS.values(), ids=GREETINGS.keys())
def test_a_peer_without_a_valid_hello_is_refused(server, frames):
    server.sent.clear()
    server.receive_frames(b"stranger", frames)
    assert [type(message) for _, message in server.sent] == [Refused]
    assert len(server.dispatcher.state.workers) == 1


BATCHES = {
    "nothing": encode([]),
    "another session's tensor": encode([FetchTensor(own(1), own(1, 2))]),
    "noise": [header_of(b"\xc1") + b"\xc1"],
    "no header": [b"", b""],
    "missing bytes": encode([CreateTensor(own(1), SMALL, INLINE, None, 0)]),
    "an unknown op": encode([RunOp(own(1), (), (), (), 0, 0)]),
    "a layout of nothing": encode([Redistribute(own(1), own(2), SpecRecord(solo_mesh(0).record(), (("y",),)), 0)]),
    "an op that makes no sense": encode([DefineOp(own(1), RICH), RunOp(own(1), (own(2),), (own(3),), (), 0, 0)]),
    "more after a goodbye": encode([Goodbye(), Synchronize(own(1))]),
    "a hello again": encode([hello("client")]),
}


@pytest.mark.parametrize("frames", BATCHES.values(), ids=BATCHES.keys())
def test_an_invalid_message_of_a_client_harms_no_other(server, frames):
    server.hear(b"other", hello("client"))
    for _ in range(2):
        server.receive_frames(b"client", frames)
    server.receive_frames(b"client", encode([Synchronize(own(9))]))
    server.hear(b"other", CreateTensor(own(1, 2), SMALL, INLINE, None, 0), payloads=[[bytes(16)]])
    assert server.hear(b"other", LocateTensor(own(2, 2), own(1, 2))) == [Located(own(2, 2), at(0).record())]


def test_an_error_of_gt_is_told_to_its_client_only(server, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("in a rule")

    monkeypatch.setattr("gt.dispatcher.plan_cache.plan_op", fail)
    server.hear(b"other", hello("client"))
    server.hear(b"client", CreateTensor(own(1), SMALL, INLINE, None, 0), payloads=[[bytes(16)]])
    batch = [
        DefineOp(own(2), signature("aten.relu.default", 1, (SMALL,))),
        RunOp(own(2), (own(1),), (own(3),), (), 0, 0),
    ]
    (answer,) = server.hear(b"client", *batch)
    assert isinstance(answer, OpFailed) and "a mistake of GT" in answer.failure.message
    assert "ZeroDivisionError: in a rule" in answer.failure.traceback and len(server.sent) == 1
    assert "RunOp of client 1 failed" in caplog.text and "Traceback" in caplog.text
    assert server.hear(b"client", FetchTensor(own(5), own(3))) == [Failed(own(5), answer.failure)]
    assert server.hear(b"client", LocateTensor(own(4), own(1))) == [Located(own(4), at(0).record())]


SECOND_MESSAGES = {
    "a worker": hello("worker"),
    "a client": hello("client"),
    "the client of a session": Resume(__version__, "server", 1, "token", 0),
}


@pytest.mark.parametrize("second", SECOND_MESSAGES.values(), ids=SECOND_MESSAGES.keys())
def test_a_connection_of_a_waiting_client_belongs_to_nobody_else(server_without_workers, second):
    server = server_without_workers
    (waiting,) = server.hear(b"waiting", hello("client"))
    assert isinstance(waiting, Waiting)
    (refused,) = server.hear(b"waiting", second)
    assert isinstance(refused, Refused) and "another" in refused.reason
    server.hear(b"worker", hello("worker"))
    assert {name: peer.hello.role for name, peer in server.peers.by_identity.items()} == {
        b"worker": "worker",
        b"waiting": "client",
    }


def test_a_peer_that_asks_for_the_session_of_another_is_counted_as_that(server):
    resume = Resume(__version__, server._leases.server, 1, "a guess", 0)
    (refused,) = server.hear(b"thief", resume)
    assert "is not one of the peer that asks for it" in refused.reason
    assert server.refusals.read()["foreign"] == 1


def test_a_waiting_client_that_sends_noise_is_not_welcomed(server_without_workers):
    server = server_without_workers
    server.hear(b"waiting", hello("client"))
    for _ in range(3):
        server.receive_frames(b"waiting", NOISE)
    server.hear(b"worker", hello("worker"))
    assert set(server.peers.by_identity) == {b"worker"}


def test_a_client_is_refused_the_end_of_its_own_session(server, caplog):
    (answer,) = server.hear(b"client", EndSession(own(1), 1))
    assert isinstance(answer, Rejected) and "session 1 is that of the client that asks" in answer.reason
    assert server.hear(b"client", ReadSessions(own(2))) == [SessionsRead(own(2), ())] and not caplog.text


LONG = "x" * MAX_TEXT


def _run_an_op_for_two_clients(server, file="train.py"):
    """Client 1 has run an op on the worker, and client 2 waits for it."""
    batch = [DefineOp(own(2), ZEROS), DefineSite(1, file, 3, ""), RunOp(own(2), (), (own(3),), (), 0, 1)]
    server.hear(b"client", *batch)
    server.peers.by_identity[b"worker"].progress = (own(2), 1)
    server.hear(b"other", hello("client"))
    server.hear(b"other", Synchronize(own(1, 2)))
    server.sent.clear()


def _told(server, identity):
    return [message for to, message in server.sent if to == identity]


def test_a_long_text_of_a_client_does_not_reach_another_one(server):
    _run_an_op_for_two_clients(server, LONG)
    server.activity.explain_waits()
    (waiting,) = _told(server, b"other")
    assert "which is at aten.zeros.default (xxx" in waiting.reason and len(waiting.reason) < 2000


def test_a_long_goodbye_of_a_worker_is_cut_off(server):
    _run_an_op_for_two_clients(server, LONG)
    server.receive_frames(b"worker", encode([Goodbye(LONG)]))
    answer, news = _told(server, b"other")
    assert answer.request == own(1, 2) and news.request == 0 and len(news.reason) + len(news.last_op) < 4000


def test_a_client_that_waits_for_many_workers_is_told_of_some(server):
    for number in range(20):
        server.hear(b"worker %d" % number, hello("worker"))
    server.hear(b"worker", StoreReady(1234))
    server.hear(b"client", Synchronize(own(1)))
    server.sent.clear()
    server.activity.explain_waits()
    (waiting,) = _told(server, b"client")
    assert waiting.reason.count("is at") == MAX_DESCRIBED and waiting.reason.endswith(", and 5 more")


@pytest.mark.parametrize(
    ("key", "told"), [("", "aten.zeros.default (train.py:3)"), ("friends", "an op of another program")]
)
def test_an_op_and_its_line_are_told_to_sessions_of_the_same_key(server, key, told):
    _run_an_op_for_two_clients(server)
    server.dispatcher.state.sessions[2].key = key
    server.activity.explain_waits()
    (waiting,) = _told(server, b"other")
    assert waiting.reason == f"for worker 0, which is at {told}"
    server.lose_peer(b"worker")
    assert {message.last_op for message in _told(server, b"other")[1:]} == {told}
    assert _told(server, b"client")[-1].last_op == "aten.zeros.default (train.py:3)"


@pytest.mark.parametrize("key", ["another", ""])
def test_a_client_with_many_requests_does_not_keep_the_server_from_others(server, monkeypatch, key):
    """Each key has its turn at once, and each client of one key in its order."""
    monkeypatch.setattr("gt.dispatcher.client_messages.TURN_SECONDS", 0.0)
    server._next_check = math.inf
    server.hear(b"other", hello("client"))
    server.peers.by_identity[b"other"].key = key
    requests = [ReadStory(own(number), own(1)) for number in range(1, 5)]
    assert [answer.request for answer in server.hear(b"client", *requests)] == [own(1)]
    answered_at_once = server.hear(b"other", ReadWorkers(own(1, 2)))
    assert bool(answered_at_once) == bool(key)
    told = [*server.sent]
    for _ in range(3):
        server.sent.clear()
        server.turn()
        told += server.sent
    served = {b"client": "c", b"other": "o"}
    assert "".join(served[to] for to, _ in told) == "cocc"


def test_a_server_does_not_drain_for_a_client_that_has_left(server, monkeypatch):
    monkeypatch.setattr("gt.dispatcher.client_messages.TURN_SECONDS", 0.0)
    server.hear(b"client", *[ReadStory(own(number), own(1)) for number in range(1, 4)])
    server.drain()
    assert not server._is_drained()
    server.lose_peer(b"client")
    assert server._is_drained()


def test_a_client_is_given_no_lists_of_sessions_that_it_does_not_take(server, monkeypatch):
    monkeypatch.setattr(backpressure, "MAX_UNREAD", 2000)
    server.hear(b"other", hello("client", program="x" * 500))
    listed = server.hear(b"client", *[ReadSessions(own(number)) for number in range(1, 100)])
    assert [answer.request for answer in listed] == [own(1), own(2), own(3), own(4)]


def test_a_client_that_asks_for_an_unknown_name_is_told_some_of_many(server):
    server.hear(b"client", CreateTensor(own(1), SMALL, INLINE, None, 0), payloads=[[bytes(16)]])
    names = [f"weight.{number:04}.{'x' * 450}" for number in range(700)]
    for number, name in enumerate(names):
        server.hear(b"client", PublishTensor(own(1 + number), own(1), name))
    (answer,) = server.hear(b"client", SubscribeTensor(own(1), own(2), "bias"))
    assert f"known: {names[0]}, " in answer.reason and answer.reason.endswith(", and 636 more")


def test_a_client_that_keeps_sending_noise_is_ignored(server):
    for _ in range(3):
        server.receive_frames(b"client", [header_of(b"\xc1") + b"\xc1"])
    assert server.hear(b"client", Synchronize(own(1))) == []


def test_a_repeated_request_id_costs_no_worker(server):
    server.hear(
        b"client", CreateTensor(own(1), SMALL, INLINE, None, 0), DefineOp(own(2), NONZERO), payloads=[[bytes(16)]]
    )
    server.hear(b"client", Synchronize(own(9)))
    (answer,) = server.hear(b"client", QueryOp(own(9), own(2), (own(1),), (), own(1 << 39), (), 0, 0))
    assert isinstance(answer, Rejected) and "request 9 is there already" in answer.reason
    server.hear(b"worker", Synchronized(own(9)))
    assert server.sent == [(b"client", Synchronized(own(9)))] and len(server.dispatcher.state.workers) == 1


NOISE = [header_of(b"\xc1") + b"\xc1"]
WAITED_FOR = [
    CreateTensor(own(1), SMALL, INLINE, None, 0),
    DefineOp(own(2), NONZERO),
    QueryOp(own(9), own(2), (own(1),), (), own(1 << 39), (), 0, 0),
]


def test_a_worker_that_keeps_sending_noise_is_reported_lost_to_waiting_clients(server):
    server.hear(b"client", Synchronize(own(9)))
    server.sent.clear()
    for _ in range(3):
        server.receive_frames(b"worker", NOISE)
    answers = [message for to, message in server.sent if to == b"client"]
    assert [type(answer) for answer in answers] == [Lost, Lost]
    assert (answers[0].request, answers[0].reason) == (
        own(9),
        "was dismissed after 3 messages that could not be read",
    )
    assert server.sent[3] == (b"worker", WorkerShutdown())
    assert len(server.dispatcher.state.workers) == 0


REPORTS = {
    "too many written": Queried(own(9), (), (SMALL,)),
    "too many results": Queried(own(9), (SMALL,) * (MAX_RESULTS + 1), ()),
    "another kind of answer": Synchronized(own(9)),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())
def test_a_worker_with_an_unusable_report_is_reported_lost_to_waiting_clients(server, report):
    server.hear(b"client", *WAITED_FOR, payloads=[[bytes(16)]])
    server.hear(b"worker", report)
    answer, news = [message for to, message in server.sent if to == b"client"]
    assert (answer.request, answer.worker, news.request) == (own(9), 0, 0)
    assert answer.reason.startswith(f"was dismissed: its {type(report).__name__} cannot be used (ProtocolError: ")
    assert answer.last_op == ""
    server.hear(b"another", hello("worker"))
    server.hear(b"client", CreateTensor(own(3), SMALL, INLINE, None, 0), payloads=[[bytes(16)]])
    assert server.hear(b"client", LocateTensor(own(4), own(3))) == [Located(own(4), at(1).record())]


def fail(*_, **__):
    raise ZeroDivisionError("of ours")


def test_an_error_of_gt_in_a_report_dismisses_the_worker(server, monkeypatch, caplog):
    server.hear(b"client", Synchronize(own(9)))
    monkeypatch.setattr(server.dispatcher._requests, "add_reply", fail)
    server.hear(b"worker", Synchronized(own(9)))
    assert [(to, type(message)) for to, message in server.sent[1:]] == [(b"client", Lost), (b"client", Lost)]
    assert "Synchronized of worker 0 cannot be used" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize("who", [b"client", b"worker"])
def test_an_error_of_gt_at_the_end_of_a_peer_does_not_end_the_server(server, monkeypatch, caplog, who):
    monkeypatch.setattr(server.dispatcher, "end_session", fail)
    monkeypatch.setattr(server.dispatcher, "lose_worker", fail)
    server.lose_peer(who)
    assert who not in server.peers.by_identity and "ZeroDivisionError: of ours" in caplog.text


def test_a_planted_file_of_a_dead_process_does_not_end_the_server(server, monkeypatch, tmp_path, fault):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"gt-{dead.pid}-x").mkdir()
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    server.hear(b"planter", msgspec.structs.replace(hello("client"), pid=dead.pid))
    server._next_check = 0.0
    server.turn(waits=False)
    assert set(server.peers.by_identity) == {b"worker", b"client"}
    fault(
        "a directory with the name of a dead client's shared buffer is in `/dev/shm`",
        "it stays there, and nothing happens",
    )


@pytest.mark.parametrize("timer", ["_check", "activity.explain_waits", "activity.describe"])
def test_an_error_of_gt_in_a_timer_does_not_end_the_server(server, monkeypatch, caplog, timer):
    server.hear(b"client", Synchronize(own(9)))
    owner, _, name = timer.rpartition(".")
    monkeypatch.setattr(getattr(server, owner) if owner else server, name, fail)
    server._next_check = server._next_notice = 0.0
    server.turn(waits=False)
    assert "ZeroDivisionError: of ours" in caplog.text


def test_a_client_that_cannot_be_welcomed_does_not_keep_others_out(server, monkeypatch):
    server.lose_peer(b"worker")
    server.hear(b"first", hello("client"))
    server.hear(b"second", hello("client"))
    opening = server.dispatcher.open_session
    monkeypatch.setattr(
        server.dispatcher, "open_session", lambda *_: setattr(server.dispatcher, "open_session", opening) or 1 / 0
    )
    server.hear(b"another", hello("worker"))
    assert [to for to, message in server.sent if isinstance(message, Welcome)] == [b"another", b"second"]


def test_an_error_of_gt_in_a_handshake_does_not_end_the_server(server, monkeypatch, caplog):
    monkeypatch.setattr(server.dispatcher, "join_worker", fail)
    assert server.hear(b"another", hello("worker")) == []
    assert "ZeroDivisionError: of ours" in caplog.text


def test_instructions_before_an_error_of_gt_are_carried_out(server, monkeypatch):
    monkeypatch.setitem(server.dispatcher._instructions.actions, LocateTensor, fail)
    server.hear(b"client", Synchronize(own(9)), LocateTensor(own(8), own(1)))
    assert [(to, type(message)) for to, message in server.sent] == [
        (b"worker", Synchronize),
        (b"client", Rejected),
    ]


def test_a_leaving_worker_is_reported_with_its_last_op(server):
    batch = [DefineOp(own(2), ZEROS), DefineSite(1, "train.py", 3, ""), RunOp(own(2), (), (own(3),), (), 0, 1)]
    server.hear(b"client", *batch)
    server.peers.by_identity[b"worker"].progress = (own(2), 1)
    server.hear(b"worker", Goodbye("MemoryError: 3 GB"))
    ((to, news),) = server.sent
    assert (to, news.reason, news.last_op) == (b"client", "left: MemoryError: 3 GB", "aten.zeros.default (train.py:3)")


def test_a_batch_over_the_limit_is_sent_in_several(server, monkeypatch):
    sent = []
    monkeypatch.setattr("gt.wire.codec.MAX_BATCH", 3)
    monkeypatch.setattr(server, "send", lambda identity, frames: sent.append(frames))
    creates = [WorkerCreateTensor(own(number), SMALL, INLINE, 0) for number in range(5)]
    commands = [ToWorkers((0,), create, [bytes([create.id % 256]) * 16]) for create in creates]
    server.delivery.send([ToWorkers((0,), Synchronize(1)), *commands, ToWorkers((0,), Synchronize(2))])
    batches = [Decoder(Command).decode(frames) for frames in sent]
    assert [len(messages) for messages, _ in batches] == [3, 2, 2]
    assert [message for messages, _ in batches for message in messages] == [
        Synchronize(1),
        *creates,
        Synchronize(2),
    ]
    assert [bytes(join(payload)) for _, payloads in batches for payload in payloads] == [
        bytes([number]) * 16 for number in range(5)
    ]


@pytest.mark.parametrize("workers", [0, -1])
def test_a_client_that_wants_no_workers_is_refused_or_served(workers):
    server = RecordingServer()
    try:
        server.hear(b"client", hello("client", wants_workers=workers))
        server.hear(b"client", CreateTensor(own(1), SMALL, INLINE, None, 0), payloads=[[bytes(16)]])
        server.hear(b"client", Synchronize(own(2)))
    finally:
        server.close()


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
def test_junk_does_not_end_the_server(server, junk, who):
    for peer in server.peers.by_identity.values():
        peer.malformed_messages = 0
    body = msgspec.msgpack.encode(junk)
    server.receive_frames(who, [header_of(body) + body])


def test_the_sessions_of_a_key_are_limited(server, monkeypatch):
    monkeypatch.setattr("gt.dispatcher.handshakes.open_files_limit", lambda: 24)
    assert [type(*server.hear(who, hello("client"))) for who in (b"second", b"third")] == [Welcome, Welcome]
    (refused,) = server.hear(b"fourth", hello("client"))
    assert "the server has 3 sessions, 3 of this key" in refused.reason
    assert server.refusals.read()["limit"] == 1
    server.hear(b"second", Goodbye())
    assert [type(answer) for answer in server.hear(b"fifth", hello("client"))] == [Welcome]
