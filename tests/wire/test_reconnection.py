"""A program whose connection is lost goes on with its session, as if nothing had happened, until its lease is over."""

import random
import re
import signal
import threading
import time

import msgspec
import pytest
import torch

import gt
from gt.client import active_session
from gt.core.messages import Refused, Resume, SessionEnded
from gt.version import __version__
from gt.wire import message_stream
from gt.wire.codec import Decoder, encode
from gt.wire.connections import open_link
from tests.proxies import proxied
from tests.subprocesses import finish, running, server_keys, start, start_server, wait_for_workers, wait_until

SECOND = {"GT_HEARTBEAT_TIMEOUT": "1"}
TRAINING = """
import sys, time, torch, gt
gt.connect(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
gt.to(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
count = gt.zeros(1)
for step in range(int(sys.argv[2])):
    batch = gt.to(torch.randn(500, 8)) + gt.randn(500, 8)
    loss = (model(batch) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    count += 1
    print(loss.item(), batch.sum().item(), gt.to(torch.randn(20_000)).cpu().sum().item(), flush=True)
    time.sleep(float(sys.argv[3]))
print(count.item())
"""


@pytest.fixture(scope="module")
def server():
    """A server with one worker, and its port."""
    main, port = start_server(**SECOND, GT_LEASE="60")
    with running(main, start("-m", "gt.worker", "-p", str(port), "--threads", "1")):
        wait_for_workers(port, 1)
        yield main, port


def said_by(process, text):
    """Wait for a line on the stderr of a process."""
    lines = []
    while not any(text in line for line in lines):
        lines.append(process.stderr.readline())
        assert lines[-1], f"it has ended without {text!r}: {lines}"
    return lines[-1]


def train(port, steps, pause=0.0, **environment):
    """Without shared memory: bytes go with the messages."""
    arguments = ("-c", TRAINING, f"localhost:{port}", str(steps), str(pause))
    return start(*arguments, GT_TRANSPORT="gloo", **SECOND, **environment)


def lines_of(program):
    code, out, err = finish(program, 90)
    assert code == 0, err
    return out.splitlines()


@pytest.fixture(scope="module")
def undisturbed(server):
    lines = lines_of(train(server[1], 8))
    assert lines[-1] == "8.0"
    return lines


@pytest.fixture
def connected(server, monkeypatch):
    """This process is connected to the server, through a proxy and without shared memory."""
    main, port = server
    monkeypatch.setenv("GT_TRANSPORT", "gloo")
    monkeypatch.setenv("GT_HEARTBEAT_TIMEOUT", "1")
    with proxied(port) as proxy:
        gt.connect(f"localhost:{proxy.port}")
        try:
            yield main, proxy
        finally:
            gt.shutdown()


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8)]])
def test_training_whose_connections_are_cut_at_random_positions_gives_the_same_numbers(server, undisturbed, seed):
    draw = random.Random(seed)
    with proxied(server[1], lambda: int(2 ** draw.uniform(9, 20))) as proxy:
        assert lines_of(train(proxy.port, 8)) == undisturbed
        assert proxy.resets > 1


@pytest.mark.parametrize("how", ["is cut", "goes silent"])
def test_a_program_whose_connection_is_lost_goes_on(connected, how, fault, caplog):
    main, proxy = connected
    x = gt.ones(3)
    x += 1
    assert x.sum().item() == 6
    if how == "goes silent":
        proxy.silent.set()
        threading.Timer(2.5, proxy.silent.clear).start()
    else:
        proxy.cut()
    for _ in range(3):
        x += 1
        assert x.sum().item() > 6
    assert x.tolist() == [5, 5, 5]
    if how == "goes silent":  # otherwise the server may hear of the new connection first
        assert "its session is kept for 60 s" in said_by(main, "is cut off")
        assert "is back after" in said_by(main, "client")
    assert any("connected again" in record.message for record in caplog.records)
    fault(f"the connection of a client {how} for less than its lease", "it connects again; nothing is lost")


def test_an_idle_program_is_connected_again(connected, caplog):
    _, proxy = connected
    x = gt.ones(3)
    gt.synchronize()
    proxy.cut()
    told = "connected again after"
    wait_until(lambda: any(told in record.message for record in caplog.records), what="a connection without a read")
    assert x.sum().item() == 3


def test_a_program_that_is_stopped_for_longer_than_the_heartbeats_goes_on(server, undisturbed, fault):
    program = train(server[1], 8, 0.01)
    with running(program):
        first = [program.stdout.readline() for _ in range(3)]
        program.send_signal(signal.SIGSTOP)
        assert "its session is kept for 60 s" in said_by(server[0], "is cut off")
        program.send_signal(signal.SIGCONT)
        assert [line.strip() for line in first] + lines_of(program) == undisturbed
    fault("a program of a server is stopped (SIGSTOP) for less than its lease, and continued", "it goes on")


def test_a_server_that_is_stopped_for_longer_than_the_heartbeats_goes_on(connected, fault):
    main, _ = connected
    x = gt.ones(3)
    gt.synchronize()
    main.send_signal(signal.SIGSTOP)
    threading.Timer(2.5, main.send_signal, (signal.SIGCONT,)).start()
    assert (x + 1).sum().item() == 6
    fault("a server is stopped (SIGSTOP) for less than the lease, and continued", "its sessions go on")


def test_a_waiting_program_is_told_for_whom_and_how_long_its_session_is_kept(connected):
    _, proxy = connected
    x = gt.ones(3)
    gt.synchronize()
    proxy.silent.set()
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(x.sum().item()))
    thread.start()
    try:
        status = "for the server at .*, to which the connection was lost . s ago; the session is kept for 5. s more"
        wait_until(lambda: _matches(status), what="the status")
    finally:
        proxy.silent.clear()
        thread.join(30)
    assert outcome == [3.0]


def _matches(pattern):
    return re.search(pattern, active_session.current().inbox._status) is not None


def test_a_program_that_sends_too_much_while_it_is_cut_off_waits(connected, monkeypatch, fault):
    monkeypatch.setattr(message_stream, "MAX_KEPT_BYTES", 1 << 21)
    _, proxy = connected
    gt.synchronize()
    proxy.silent.set()
    made = []

    def upload():
        for n in range(8):
            made.append(gt.to(torch.full((200_000,), float(n))))

    thread = threading.Thread(target=upload)
    thread.start()
    try:
        wait_until(lambda: active_session.current().channel.is_full, what="the bound")
        time.sleep(0.5)
        assert 0 < len(made) < 8
        assert active_session.current().channel._stream.kept_bytes < 4 << 20
    finally:
        proxy.silent.clear()
        thread.join(30)
    assert [x[0].item() for x in made] == list(range(8))
    fault("a program sends more than is kept while it is cut off", "it waits, and then goes on")


def test_nobody_else_goes_on_with_a_session(connected, fault):
    main, _ = connected
    welcome = active_session.current().welcome
    port = int(active_session.current().channel._endpoint.rpartition(":")[2])
    stolen = Resume(__version__, welcome.server, welcome.ident, "0" * 32, 1)
    reason = f"session {welcome.ident} is not one of the peer that asks for it"
    assert reason in ask(port, stolen).reason
    assert "refused a message" in said_by(main, reason)
    assert gt.ones(3).sum().item() == 3
    assert isinstance(ask(port, Resume(__version__, welcome.server, 4000, "0" * 32, 1)), SessionEnded)
    assert "has no session of before" in ask(port, Resume(__version__, "another", 1, "", 1)).reason
    fault(
        "somebody else asks for the session of a client that is cut off",
        "refused: session 1 is not one of the peer that asks for it",
    )


def ask(port, resume):
    """The answer to a Resume over a connection of its own."""
    link = open_link(f"tcp://127.0.0.1:{port}", server_keys(), 5000, 0)
    try:
        link.send(encode([resume]))
        return Decoder(Refused | SessionEnded).decode(link.receive())[0][0]
    finally:
        link.close()


@pytest.fixture
def briefly_kept(monkeypatch):
    """This process is connected through a proxy to a server that keeps sessions for a second."""
    main, port = start_server(**SECOND, GT_LEASE="1")
    monkeypatch.setenv("GT_HEARTBEAT_TIMEOUT", "1")
    with (
        running(main, start("-m", "gt.worker", "-p", str(port), "--threads", "1")),
        proxied(port) as proxy,
    ):
        wait_for_workers(port, 1)
        gt.connect(f"localhost:{proxy.port}")
        try:
            yield main, port, proxy
        finally:
            gt.shutdown()


def test_a_client_that_stays_away_is_freed_after_its_lease_and_told(briefly_kept, fault):
    main, port, proxy = briefly_kept
    x = gt.ones(250_000)
    assert x.sum().item() == 250_000
    reconnection = active_session.current().channel._reconnection
    reconnection._welcome = msgspec.structs.replace(reconnection._welcome, lease=60.0)  # the client tries for longer
    proxy.silent.set()
    freed = said_by(main, "was freed")
    assert "cut off for 1 s, the time of its lease" in freed and "its 2 tensors (1 MB) are lost" in freed
    proxy.silent.clear()
    with pytest.raises(gt.SessionLost, match="does not go on with the session: the session was freed") as error:
        x.sum().item()
    fault("a client is cut off for longer than its lease", error.value)
    gt.shutdown()
    gt.connect(f"localhost:{port}")
    assert sum(worker.held for worker in gt.workers()) == 0


@pytest.mark.parametrize("what", ["the connection of a client goes silent", "a server is stopped (SIGSTOP)"])
def test_a_server_that_cannot_be_reached_for_the_time_of_the_lease_is_lost(briefly_kept, what, fault):
    main, _, proxy = briefly_kept
    x = gt.ones(3)
    gt.synchronize()
    if "SIGSTOP" in what:
        main.send_signal(signal.SIGSTOP)
    else:
        proxy.silent.set()
    begun = time.monotonic()
    with pytest.raises(gt.ServerLost, match="could not be made again for 1 s") as error:
        x.sum().item()
    assert time.monotonic() - begun < 15
    main.send_signal(signal.SIGCONT)
    fault(f"{what} for longer than the lease", error.value)
