"""A lost connection is an error at both ends, and a lost peer can join again."""

import contextlib
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import zmq

import gt
from gt.client import active_session
from gt.client.session_reads import locate
from gt.core.errors import ConnectionLost
from gt.wire.connections import Router, open_link
from gt.wire.server_keys import make_keys
from tests.proxies import proxied
from tests.subprocesses import finish, running, start, start_server, wait_for_workers, wait_until
from tests.web_dashboard.requests import read_until

SILENCE = {"GT_HEARTBEAT_TIMEOUT": "2"}


@pytest.fixture
def ends(tmp_path):
    """A router, and a link to it from which it has received a message."""
    router = Router(f"ipc://{tmp_path}/router", None, 2000, 0)
    link = open_link(f"ipc://{tmp_path}/router", tmp_path, 2000, 0)
    link.send([b"hello"])
    name, frames = router.receive()
    assert frames == [b"hello"]
    yield router, link, name
    link.close()
    router.close()


def test_a_router_and_a_link_receive_messages_of_each_other(ends):
    router, link, name = ends
    router.send(name, [b"welcome", b"here"])
    assert link.receive() == [b"welcome", b"here"]
    assert router.take_lost() == [] and not link.is_lost()


def test_a_router_tells_whose_connection_was_lost(ends):
    router, link, name = ends
    link.close()
    lost = []
    wait_until(lambda: lost.extend(router.take_lost()) or lost == [name], what="the loss of a link")
    router.send(name, [b"to nobody"])


def test_another_connection_with_the_same_descriptor_is_another_peer(tmp_path):
    with contextlib.closing(Router(f"ipc://{tmp_path}/router", None, 2000, 0)) as router:
        names = []
        for _ in range(5):
            with contextlib.closing(open_link(f"ipc://{tmp_path}/router", tmp_path, 2000, 0)) as link:
                link.send([b"hello"])
                names.append(router.receive()[0])
        lost = []
        wait_until(lambda: lost.extend(router.take_lost()) or len(lost) == 5, what="the loss of five links")
        assert sorted(lost) == sorted(names) and len(set(names)) == 5


def test_a_wait_for_a_message_can_be_interrupted(ends, tmp_path):
    reading, writing = socket.socketpair()
    with reading, writing:
        link = open_link(f"ipc://{tmp_path}/router", tmp_path, 60_000, 0, reading.fileno())
        with contextlib.closing(link), ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(link.receive)
            assert not waiting.done()
            writing.send(b"\0")
            assert waiting.result(10) is None


def test_a_link_tells_that_its_router_is_gone(tmp_path):
    router = Router(f"ipc://{tmp_path}/router", None, 2000, 0)
    with contextlib.closing(open_link(f"ipc://{tmp_path}/router", tmp_path, 0, 0)) as link:
        router.close()
        wait_until(link.is_lost, what="the loss of the router")
        with pytest.raises(ConnectionLost):
            link.send([b"to nobody"])


def test_a_peer_that_does_not_take_its_messages_is_given_up(tmp_path, monkeypatch):
    """Here one that speaks ZeroMQ and has a limit for what it keeps itself."""
    monkeypatch.setattr("gt.wire.connections.MAX_QUEUED", 8)
    with (
        zmq.Context() as context,
        contextlib.closing(Router(f"ipc://{tmp_path}/router", None, 2000, 0)) as router,
        context.socket(zmq.DEALER) as slow,
    ):
        slow.setsockopt(zmq.RCVHWM, 8)
        slow.setsockopt(zmq.LINGER, 0)
        slow.connect(f"ipc://{tmp_path}/router")
        slow.send(b"hello")
        name, _ = router.receive()
        lost = []
        for _ in range(1000):
            router.send(name, [bytes(1 << 20)])
            lost += router.take_lost()
            if lost:
                break
        assert lost == [name]


@pytest.fixture
def server():
    """A server without workers, and its port."""
    main, port = start_server(**SILENCE)
    with running(main):
        yield main, port


def said_by(process, text):
    """Wait for a line on the stderr of a process."""
    lines = []
    while not any(text in line for line in lines):
        lines.append(process.stderr.readline())
        assert lines[-1], f"it has ended without {text!r}: {lines}"
    return lines[-1]


@contextlib.contextmanager
def limited_router():
    """A router whose queues may hold 8 MiB, and a connection to it that does not read by itself."""
    keys, members = make_keys()
    router = Router("tcp://127.0.0.1:*", keys, 50, 0, max_waiting=8 << 20)
    with contextlib.closing(router), zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 1 << 14)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.curve_serverkey = members.server.encode()
        dealer.curve_publickey, dealer.curve_secretkey = members.public.encode(), members.secret.encode()
        dealer.connect(router.endpoint)
        dealer.send(b"hello")
        name, _ = receive_one(router)
        yield router, dealer, name


def receive_one(router):
    while (message := router.receive()) is None:
        pass
    return message


READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def test_a_message_that_is_never_finished_is_limited():
    """ZeroMQ's own sockets send a message when it is complete, so this peer writes its frames by hand."""
    router = Router("tcp://127.0.0.1:*", None, 50, 0, max_waiting=8 << 20)
    address = ("127.0.0.1", int(router.endpoint.rpartition(":")[2]))
    with contextlib.closing(router), socket.create_connection(address) as peer:
        peer.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        read_until(peer, b"READY")
        peer.sendall(b"\0\5hello")
        name, _ = receive_one(router)
        lost = []
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                peer.sendall(b"\3" + struct.pack(">Q", 1 << 20) + bytes(1 << 20))  # more follow
                lost += router.take_lost()
        wait_until(lambda: lost or lost.extend(router.take_lost()), what="the end of the connection")
        assert lost == [name] and router.refusals.read() == {"limit": 1}


def test_messages_that_a_peer_does_not_take_are_limited_in_bytes():
    with limited_router() as (router, _, name):
        lost = []
        for _ in range(64):
            router.send(name, [bytes(1 << 20)])
            lost += router.take_lost()
        wait_until(lambda: lost or lost.extend(router.take_lost()), what="the end of the connection")
        assert lost == [name] and router.refusals.read() == {"limit": 1}


@pytest.mark.parametrize("size", [0, 1, 222, 223, 5000, 1 << 20])
def test_bytes_on_the_wire_are_counted_exactly(size):
    """Any difference would add up over the life of a connection."""
    with limited_router() as (router, dealer, name):
        before = waiting_bytes(router, name)
        for _ in range(50):
            dealer.send_multipart([bytes(size), bytes(size)])
            receive_one(router)
            router.send(name, [bytes(size)])
            dealer.recv()
        wait_until(lambda: waiting_bytes(router, name) == before, what="the same number of bytes in queues")


def waiting_bytes(router, name):
    return router._wire_bytes.waiting(name, router._watch.carried(router._peers[name]))


@pytest.mark.parametrize("how", ["is cut", "goes silent"])
def test_a_worker_whose_link_is_lost_is_given_up_and_joins_again_with_nothing(server, how, fault):
    main, port = server
    with proxied(port) as proxy:
        worker = start("-m", "gt.worker", "-p", str(proxy.port), "--threads", "1", **SILENCE)
        with running(worker):
            wait_for_workers(port, 1)
            gt.connect(f"localhost:{port}")
            try:
                x = gt.ones(3)
                assert x.sum().item() == 3
                if how == "goes silent":
                    proxy.silent.set()
                    threading.Timer(4, proxy.silent.clear).start()
                else:
                    proxy.cut()
                lost = r"worker 0 .*its connection was closed, or silent for 2 s"
                with pytest.raises(gt.WorkerLost, match=lost) as error:
                    while True:
                        x.sum().item()
                assert "worker 0" in said_by(main, "is gone")
                assert "joins again without its tensors" in said_by(worker, "was lost")
                wait_for_workers(port, 1)
                assert (gt.ones(3) + 1).sum().item() == 6
                assert locate(gt.ones(3)._ref).mesh.workers == (1,)
                fault(f"the connection of a worker {how}", error.value)
                fault(f"the same worker, after its connection {how}", "joined again with nothing, as worker 1")
            finally:
                gt.shutdown()


def test_busy_workers_and_idle_programs_answer_heartbeats(monkeypatch, fault):
    """The dispatcher of a program that asks for nothing gets no turn; heartbeats are answered all the same."""
    monkeypatch.setenv("GT_HEARTBEAT_TIMEOUT", "1.5")
    gt.init(workers=1)
    try:
        x, y = gt.ones(3), gt.to(torch.randn(400, 400))
        for _ in range(400):
            y = (y @ y) * 1e-3
        y.sum().item()
        time.sleep(2)
        assert x.sum().item() == 3
        fault("a worker computes, or a program asks for nothing, for longer than the limit", "nothing: both go on")
    finally:
        gt.shutdown()


def test_a_stopped_worker_is_given_up_and_ended(monkeypatch, caplog, fault):
    monkeypatch.setenv("GT_HEARTBEAT_TIMEOUT", "1")
    gt.init(workers=1)
    try:
        x = gt.ones(3)
        gt.synchronize()
        process = psutil.Process(active_session.current().welcome.workers[0].pid)
        process.suspend()
        ended = r"was stopped for 1 s \(GT_HEARTBEAT_TIMEOUT\), and ended for that"
        with pytest.raises(gt.WorkerLost, match=ended) as error:
            x.sum().item()
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, what="its end")
        assert [record.name for record in caplog.records if "was stopped for 1 s" in record.message]
        fault("a worker is stopped (SIGSTOP)", error.value)
    finally:
        gt.shutdown()


@pytest.mark.parametrize("met", [True, False], ids=["met before", "never met"])
def test_a_worker_that_waits_for_one_that_was_given_up_goes_on(server, met, fault):
    """It was told of an exchange that the other never heard of."""
    _, port = server
    steady = start("-m", "gt.worker", "-p", str(port), "--threads", "1", **SILENCE)
    with proxied(port) as proxy, running(steady):
        wait_for_workers(port, 1)
        with running(start("-m", "gt.worker", "-p", str(proxy.port), "--threads", "1", **SILENCE)):
            wait_for_workers(port, 2)
            gt.connect(f"localhost:{port}")
            try:
                kept, lost = [gt.to(torch.ones(3)) + number for number in range(2)]
                placed = [x.spec.mesh.workers for x in (kept, lost)]
                assert placed == [(0,), (1,)]
                if met:
                    assert (kept + lost).sum().item() == 9
                    lost = lost + 1
                gt.synchronize()
                proxy.silent.set()
                threading.Timer(5, proxy.silent.clear).start()
                with pytest.raises((gt.WorkerLost, gt.OpError)):
                    (kept + lost).sum().item()
                assert kept.sum().item() == 3
                fault("a worker waits in an exchange for one that was given up", "the op fails, and the worker goes on")
            finally:
                gt.shutdown()


STOPPED = """
import signal
import socket
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
import gt
x = gt.ones(3)
gt.synchronize()
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
print(x.sum().item())
"""


def test_a_program_that_was_stopped_finds_its_workers(fault):
    program = start("-c", STOPPED, GT_WORKERS="1", GT_HEARTBEAT_TIMEOUT="0.5")
    with running(program):
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        program.send_signal(signal.SIGCONT)
        program.send_signal(signal.SIGUSR1)
        code, out, err = finish(program, 30)
        assert (code, out) == (0, "3.0\n"), err
        fault("a program with workers of its own is stopped for longer than the limit, and continued", "it goes on")


def test_a_batch_just_under_the_limit_is_served(server, fault):
    """It becomes commands over the limit of a client's batch, in several messages."""
    _, port = server
    with running(start("-m", "gt.worker", "-p", str(port), "--threads", "1")):
        wait_for_workers(port, 1)
        gt.connect(f"localhost:{port}")
        try:
            parts = [gt.ones(1) for _ in range(20_000)]
            joined = [torch.cat(parts) for _ in range(25)]
            assert [x.sum().item() for x in joined] == [20_000] * 25
            fault("a batch becomes commands over the limit of a message", "it is sent in several, and done")
        finally:
            gt.shutdown()
