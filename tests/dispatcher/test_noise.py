"""Peers that send noise, read nothing, or open many connections do not disturb the others."""

import contextlib
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import time

import psutil
import pytest
import zmq

from gt.core.errors import ProtocolError, ServerLost
from gt.core.messages import (
    ACKNOWLEDGED_BYTES,
    AckBytes,
    ByteRange,
    CreateTensor,
    FetchTensor,
    FreeTensors,
    Hello,
    Instruction,
    Refused,
    Rejected,
    TensorRead,
    Welcome,
    WorkerHostStore,
)
from gt.dispatcher import backpressure
from gt.dispatcher.backpressure import Backpressure
from gt.dispatcher.departures import PendingConnections
from gt.version import __version__
from gt.wire.codec import Decoder, encode
from gt.wire.connections import Router, open_link
from gt.wire.file_descriptors import open_files_limit
from gt.wire.message_stream import ACKNOWLEDGED_MESSAGES
from gt.wire.process_identity import this_host
from gt.wire.server_keys import find_keys
from gt.wire.socket_channel import SocketChannel
from gt.wire.stderr_logging import MAX_REPEATS, REPEAT_SECONDS, StderrHandler
from tests.dispatcher.recording_server import hello
from tests.records import meta, own
from tests.subprocesses import ROOT, find_port, running, server_keys, start, start_server, wait_for_workers, wait_until


def endpoint(port):
    return f"tcp://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def server():
    """A server with a worker; its stderr is not read."""
    main, port = start_server()
    with running(main, start("-m", "gt.worker", "-p", str(port), "--threads", "1")):
        wait_for_workers(port, 1)
        yield main, port


@contextlib.contextmanager
def dealer(port, most=0):
    """A connection of a member that takes at most so many messages by itself."""
    with zmq.Context() as context, connected(context, port, most) as dealer:
        yield dealer


@contextlib.contextmanager
def connected(context, port, most=0):
    keys = find_keys(server_keys(), endpoint(port))
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, most)
        dealer.setsockopt(zmq.RCVTIMEO, 20_000)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.curve_serverkey = keys.server.encode()
        dealer.curve_publickey, dealer.curve_secretkey = keys.public.encode(), keys.secret.encode()
        dealer.connect(endpoint(port))
        yield dealer


# Noise


def test_noise_without_a_hello_is_cut_off_and_does_not_stop_the_server(server, fault):
    main, port = server
    link = open_link(endpoint(port), server_keys(), 10_000, 0)
    with contextlib.closing(link):
        for _ in range(5_000):
            link.send([b"noise" * 20])
        refusals = [Decoder(Refused).decode(link.receive())[0][0] for _ in range(3)]
        assert all("does not speak GT's protocol" in refused.reason for refused in refusals)
        wait_until(link.is_lost, what="the end of the connection")
    wait_for_workers(port, 1)
    assert main.poll() is None
    fault("a peer without a hello sends noise without end", "it is disconnected after three; others are served")


def test_many_peers_with_noise_do_not_fill_the_log(server):
    """More lines than a pipe holds."""
    main, port = server
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(dealer(port)) for _ in range(40)]
        for _ in range(100):
            for peer in peers:
                with contextlib.suppress(zmq.Again):
                    peer.send(b"noise" * 1000, zmq.NOBLOCK)
        wait_for_workers(port, 1)
    assert main.poll() is None


def test_an_unknown_peer_is_disconnected_after_three_malformed_messages():
    unknown = PendingConnections()
    for now in range(3):
        assert b"x" not in unknown.leaving
        unknown.note_malformed_message(b"x", now)
    assert unknown.take_due(6.9) == [] and unknown.take_due(7.0) == [b"x"]
    unknown.forget(b"x")
    assert unknown.take_due(9.0) == []


# The log


def record(text, *values, created=0.0, level=logging.WARNING):
    made = logging.LogRecord("gt.dispatcher", level, "", 0, text, values, None)
    made.created = created
    return made


class Heard(StderrHandler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def _try_write(self, text):
        self.lines += text.splitlines()
        return True


def test_warnings_that_repeat_are_counted():
    handler = Heard()
    for number in range(5000):
        handler.emit(record("refused %d", number))
    handler.emit(record("other", created=1.0))
    assert handler.lines == [*[f"refused {number}" for number in range(MAX_REPEATS)], "other"]
    handler.emit(record("other", created=REPEAT_SECONDS))
    assert handler.lines[-2:] == [f"refused 4999 (and {4999 - MAX_REPEATS:,} more like this)", "other"]
    handler.close()


def test_the_number_of_omitted_lines_is_logged_at_the_end():
    handler = Heard()
    for number in range(MAX_REPEATS + 3):
        handler.emit(record("%s", "the same"))
        handler.emit(record("%s", number))
    handler.close()
    assert handler.lines[-1] == "the same (and 2 more like this)"
    assert len(handler.lines) == 2 * MAX_REPEATS + 3 + 1


def test_values_of_peers_do_not_move_the_cursor_nor_pass_for_lines():
    handler = Heard()
    handler.emit(record("refused %s (%d)", "\x1b[2J\x07\nworker 7 has left\u2028", 3))
    assert handler.lines == ["refused \\x1b[2J\\x07", "  worker 7 has left\\u2028 (3)"]
    handler.close()


def test_kinds_of_warnings_are_limited():
    handler = Heard()
    for number in range(5000):
        handler.emit(record("%s", f"refused {number}"))
    assert len(handler._warnings) <= 1025
    handler.close()


def test_debug_output_is_not_counted():
    handler = Heard()
    for number in range(100):
        handler.emit(record("joined %d", number, level=logging.INFO))
    assert len(handler.lines) == 100
    handler.close()


TALKS = """
import logging, sys
from gt.core.settings import Settings
from gt.wire.stderr_logging import configure_logging
configure_logging(Settings(verbose=True))
for number in range(3000):
    logging.getLogger("gt.dispatcher").info("line %d %s", number, "x" * 100)
print("done", flush=True)
sys.stdin.readline()
logging.getLogger("gt.dispatcher").info("the last")
"""


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_an_unread_log_does_not_stop_the_program(kind):
    if kind == "pipe":
        near, far = os.pipe()
    else:
        near, far = (end.detach() for end in socket.socketpair())
    program = subprocess.Popen(
        [sys.executable, "-c", TALKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=far, text=True, cwd=ROOT
    )
    os.close(far)
    with running(program), os.fdopen(near, "rb") as log:
        alarm = time.monotonic() + 30
        assert program.stdout.readline() == "done\n" and time.monotonic() < alarm
        os.set_blocking(near, False)
        begin = log.read()
        assert b"line 0 x" in begin and b"line 2999" not in begin
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.wait(30) == 0
        end = log.read()
        assert b"lines were not written, as nobody read them\n" in end and b"the last" in end


# Answers that nobody takes


ITEM = meta(15_000)  # 60 kB: less than is counted by itself
COUNT = 5_000  # of them are 300 MB, which is over the limit


def test_small_reads_that_are_not_taken_are_not_begun(server, fault):
    main, port = server
    process = psutil.Process(main.pid)
    with dealer(port, most=1) as client:
        client.send_multipart(encode([hello("client")]))
        ((welcome,), _) = Decoder(Welcome).decode(client.recv_multipart())
        session = welcome.ident
        before = process.memory_info().rss
        created = CreateTensor(own(1, session), ITEM, ByteRange("", ITEM.nbytes), None, 0)
        client.send_multipart(encode([created], [[bytes(ITEM.nbytes)]]))
        for number in range(2, 4 * COUNT, 500):
            requests = range(own(number, session), own(number + 500, session))
            client.send_multipart(encode([FetchTensor(request, own(1, session)) for request in requests]))
        most, grown = 0, time.monotonic()
        while time.monotonic() - grown < 3:  # until no more comes
            held = process.memory_info().rss - before
            if held > most + 1e6:
                most, grown = held, time.monotonic()
            assert most < 600e6
        wait_for_workers(port, 1)
    fault("a client asks for many small tensors and takes none", "it is given 256 MiB of them; others are served")


def test_small_reads_that_are_taken_late_are_all_answered(server):
    _, port = server
    channel = SocketChannel(endpoint(port), None, server_keys(), 0)
    with contextlib.closing(channel):
        session = channel.greet(1, 30).ident
        channel.send([CreateTensor(own(1, session), ITEM, ByteRange("", ITEM.nbytes), None, 0)], [bytes(ITEM.nbytes)])
        channel.send([FetchTensor(own(number, session), own(1, session)) for number in range(2, COUNT)], [])
        time.sleep(2)
        fetched, deadline = 0, time.monotonic() + 60
        while fetched < COUNT - 2:
            assert time.monotonic() < deadline
            answers = channel.receive()
            fetched += sum([isinstance(received.answer, TensorRead) for received in answers])
            if not answers:
                channel.wait()


def test_a_client_that_sends_much_between_its_small_reads_has_taken_no_more_than_was_sent(server):
    """The server acknowledges messages that have no answers by messages that it does not count."""
    _, port = server
    channel = SocketChannel(endpoint(port), None, server_keys(), 0)
    with contextlib.closing(channel):
        session = channel.greet(1, 30).ident
        channel.send([CreateTensor(own(1, session), ITEM, ByteRange("", ITEM.nbytes), None, 0)], [bytes(ITEM.nbytes)])
        for number in range(2, 2 + 3 * ACKNOWLEDGED_BYTES // ITEM.nbytes):
            for _ in range(2 * ACKNOWLEDGED_MESSAGES):
                channel.send([FreeTensors(())], [])
            channel.send([FetchTensor(own(number, session), own(1, session))], [])
            answers, deadline = [], time.monotonic() + 30
            while not any(isinstance(answer, TensorRead) for answer in answers):
                assert not any(isinstance(answer, Rejected | Refused) for answer in answers), answers
                assert time.monotonic() < deadline
                channel.wait()
                answers += [received.answer for received in channel.receive()]


def test_sent_bytes_count_until_they_are_taken(monkeypatch):
    monkeypatch.setattr(backpressure, "MAX_UNREAD", 100)
    monkeypatch.setattr(backpressure, "MAX_SENT", 200)
    session = Backpressure()
    session.queue([Instruction.__args__[0](own(1), (), (), (), 0, 0), FetchTensor(own(2), own(1))], [])
    session.note_sent(100)
    assert session.next() is None
    session.note_taken(1)
    assert session.next().read == FetchTensor(own(2), own(1))
    session.note_sent(102)
    with pytest.raises(ProtocolError, match="201 bytes of answers are not taken"):
        session.require_taken()
    with pytest.raises(ProtocolError, match="cannot be taken"):
        session.note_taken(202)


def test_a_read_cannot_be_taken_before_it_is_answered():
    session = Backpressure()
    session.begin(own(2), 1 << 20)
    with pytest.raises(ProtocolError, match="before it is answered"):
        session.acknowledge(own(2))
    session.note_read(TensorRead(own(2), (ByteRange("", 1 << 20),)))
    session.acknowledge(own(2))
    session.acknowledge(own(2))


def test_a_small_read_counts_from_its_beginning(monkeypatch):
    monkeypatch.setattr(backpressure, "MAX_UNREAD", 100)
    session = Backpressure()
    session.begin(own(2), 100)
    session.queue([FetchTensor(own(3), own(1))], [])
    assert session.next() is None
    session.note_read(TensorRead(own(2), (ByteRange("", 100),)))
    assert session.next() is not None


def test_a_client_that_claims_to_have_taken_more_than_it_was_sent_is_refused(server):
    _, port = server
    with dealer(port) as client:
        client.send_multipart(encode([hello("client")]))
        client.recv_multipart()
        client.send_multipart(encode([AckBytes(1 << 40)]))
        ((refused,), _) = Decoder(Refused).decode(client.recv_multipart())
        assert "cannot be taken" in refused.reason


# Connections


def test_a_dropped_connection_is_lost_like_any_other(tmp_path):
    address = f"ipc://{tmp_path}/server"
    router = Router(address, None, 5000, 0)
    with contextlib.closing(router), contextlib.closing(open_link(address, server_keys(), 5000, 0)) as link:
        link.send([b"hello"])
        name, _ = router.receive()
        router.drop(name)
        wait_until(link.is_lost, what="the end of the connection")
        wait_until(lambda: name in router.take_lost(), what="the loss of the peer")


def one_channel(port, keys=True):
    return contextlib.closing(SocketChannel(endpoint(port), None, server_keys() if keys else None, 0))


@contextlib.contextmanager
def server_of_256_files(log, *options):
    with log.open("w") as stderr:
        main = subprocess.Popen(
            [sys.executable, "-m", "gt.server", "-p", "0", *options],
            cwd=ROOT,
            stderr=stderr,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 256)),  # noqa: PLW1509
        )
    with running(main):
        port = find_port(main, server_keys())
        assert resource.prlimit(main.pid, resource.RLIMIT_NOFILE) == (256, 256)
        yield main, port


@pytest.mark.parametrize(("role", "most"), [("client", 32), ("worker", 64)])
def test_peers_beyond_a_limit_are_refused_with_the_reason_and_disconnected(tmp_path, role, most, fault):
    """300 of one key, at a server that may open 256 files."""
    host, address = ("elsewhere", "127.0.0.1") if role == "worker" else (this_host(), "")
    said = Hello(__version__, role, host, os.getpid(), address=address, wants_workers=0)
    log = tmp_path / "log"
    with server_of_256_files(log) as (main, port), zmq.Context() as context:
        files, answers = psutil.Process(main.pid).num_fds, []
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                peer = stack.enter_context(connected(context, port))
                peer.send_multipart(encode([said]))
                answers.append(Decoder(Welcome | Refused | WorkerHostStore).decode(peer.recv_multipart())[0][0])
            assert sum(isinstance(answer, Welcome) for answer in answers) == most
            assert all("limit: ulimit -n" in answer.reason for answer in answers if isinstance(answer, Refused))
            wait_until(lambda: files() < 2 * most + 60, what="the end of refused connections")
            if role == "client":
                with pytest.raises(ProtocolError, match="it takes 64, 32 of a key"), one_channel(port) as channel:
                    channel.greet(0, 20)
        wait_until(lambda: files() < 60, what="the end of the others")
        if role == "worker":  # sessions are kept for a while
            with one_channel(port) as channel:
                assert channel.greet(0, 20).ident
        assert main.poll() is None
    assert "Traceback" not in log.read_text()
    fault(f"300 {role}s of one key at a server that may open 256 files", f"{most} join, the others are told why")


def test_a_server_that_shakes_no_hands_is_said_to_listen():
    reason = "something listens at .*, but does not shake hands: it is stopped or busy, or it may have as many"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with one_channel(port, keys=False) as channel, pytest.raises(ServerLost, match=reason):
            channel.greet(0, 7)


def test_connections_beyond_a_limit_that_say_nothing_are_closed(fault, tmp_path):
    """5,000 of them, at a server that may open 256 files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = min(5000, most - 500)
    with server_of_256_files(tmp_path / "log") as (main, port), contextlib.ExitStack() as stack:
        for _ in range(count):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.connect(("127.0.0.1", port))
        with running(start("-m", "gt.worker", "-p", str(port), "--threads", "1")):
            wait_for_workers(port, 1)
        wait_until(lambda: psutil.Process(main.pid).num_fds() < 200, what="the end of silent connections")
        assert main.poll() is None
    fault("5,000 connections to a server that may open 256 files", "it closes the oldest silent ones; members join")


def test_strangers_at_the_dashboard_and_at_health_leave_files_to_members(tmp_path):
    """300 connections to each, at a server that may open 256 files."""
    log = tmp_path / "log"
    with server_of_256_files(log, "--dashboard", "0", "--health-port", "0") as (main, port):
        wait_until(lambda: len(re.findall(r"\d/\S", log.read_text())) == 2, what="both addresses")
        files = psutil.Process(main.pid).num_fds
        before = files()
        with contextlib.ExitStack() as stack:
            for other in map(int, re.findall(r"http://127.0.0.1:(\d+)/", log.read_text())):
                for _ in range(300):
                    stack.enter_context(socket.create_connection(("127.0.0.1", other), 10))
            assert files() - before < 64
            with one_channel(port) as channel:
                assert channel.greet(0, 20).ident
    assert "Traceback" not in log.read_text()


def test_the_limit_of_files_is_the_hard_one_where_a_dispatcher_listens(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        Router(f"ipc://{tmp_path}/server", None, 0, 0).close()
        assert open_files_limit() == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
