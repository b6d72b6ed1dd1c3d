"""A server with real workers gets frames that are almost valid: it stays up, and no other session notices."""

import contextlib
import gc
import logging
import threading
import time

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from gt.core.ids import session_of
from gt.core.messages import CreateTensor, FetchTensor, Synchronize, TensorRead, Waiting, Welcome
from gt.dispatcher.server import Server
from gt.wire.codec import encode
from gt.wire.message_stream import MessageStream
from gt.wire.server_keys import make_keys, remove_keys, write_keys
from tests.dispatcher.invariants import check_invariants
from tests.hostile_frames import CLIENT_KINDS, TENSORS, WORKER_KINDS, frames_of, messages, prelude
from tests.hostile_peers import ANSWERS, hello, member
from tests.records import INLINE, SMALL, own
from tests.subprocesses import running, server_keys, start

PER_EXAMPLE = 25  # frames
PER_DRAW = 5_000  # frames: hypothesis keeps all that it has drawn in memory until it draws anew
SILENCE = 60  # seconds, on a machine that does other things
SECRET = bytes(range(16))


class Bystander:
    """A client whose tensor nobody else may change."""

    def __init__(self, harness, dealer):
        self._harness = harness
        self._dealer = dealer
        self._next = 10
        self._stream = MessageStream()
        self.session = harness.greet(dealer, hello(), self._stream).ident
        self._send(CreateTensor(own(1, self.session), SMALL, INLINE, None, 0), [[SECRET]])

    def check(self):
        """Its tensor has its value."""
        self._next += 1
        self._send(FetchTensor(own(self._next, self.session), own(1, self.session)))
        for answer, payloads in self._harness.answers(self._dealer, self._stream):
            if isinstance(answer, TensorRead):
                assert bytes(payloads[0][0]) == SECRET
                return

    def _send(self, message, payloads=()):
        for frames in self._stream.encode([message], payloads):
            self._dealer.send_multipart(frames)


class Harness:
    """A server in this process, which is driven by the test, with two workers that are processes."""

    def __init__(self, stack):
        keys, members = make_keys()
        self.server = Server("tcp://127.0.0.1:*", keys=keys, silence=SILENCE)
        stack.callback(self.server.close)
        write_keys(server_keys(), self.server.endpoint, members)
        stack.callback(remove_keys, server_keys(), self.server.endpoint, members)
        self.port = int(self.server.endpoint.rpartition(":")[2])
        command = ("-m", "gt.worker", "-p", str(self.port), "--threads", "1")
        self.workers = [start(*command, GT_HEARTBEAT_TIMEOUT=str(SILENCE)) for _ in range(2)]
        stack.enter_context(running(*self.workers))
        self.until(lambda: len(self.server.dispatcher.ready_workers()) == 2)
        self.bystander = Bystander(self, stack.enter_context(member(self.port)))

    def until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            self.server.turn()
            assert time.monotonic() < deadline

    def answers(self, dealer, stream=None, seconds=30):
        """The answers to a peer, with their bytes, as they come. A stream notes them."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.server.turn(waits=False)
            if dealer.poll(0):
                frames = dealer.recv_multipart()
                if stream is not None:
                    stream.accept(frames)
                found, payloads = ANSWERS.decode(frames)
                for answer in found:
                    yield answer, payloads
        raise TimeoutError(f"no answer has come; refused: {self.server.refusals.read()}")

    def greet(self, dealer, sent, stream=None):
        dealer.send_multipart(encode([sent]))
        for answer, _ in self.answers(dealer, stream):
            assert isinstance(answer, Welcome | Waiting), answer
            if isinstance(answer, Welcome):
                return answer
        raise AssertionError

    def settle(self):
        """Let the server read everything that was sent to it."""
        for _ in range(3):
            while self.server.turn(waits=False):
                pass
            time.sleep(0.001)

    @contextlib.contextmanager
    def client(self):
        """A session in which ops are defined and tensors exist."""
        with contextlib.ExitStack() as stack:
            dealer, session = self._join(stack)
            dealer.send_multipart(encode(prelude(session), [[bytes(16)]] * len(TENSORS)))
            dealer.send_multipart(encode([Synchronize(own(390, session))]))
            next(self.answers(dealer))
            yield dealer, session

    def _join(self, stack):
        """On a busy machine a handshake may take too long, and its connection is not made again by itself."""
        for _ in range(3):
            dealer = stack.enter_context(member(self.port))
            with contextlib.suppress(TimeoutError):
                return dealer, self.greet(dealer, hello()).ident
        raise AssertionError("nobody is let in any more")


@pytest.fixture(scope="module")
def harness():
    """A session may send any number of malformed messages: others would be ignored after them."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("gt.dispatcher.server.MAX_MALFORMED", 1 << 30)
        monkeypatch.setattr("gt.dispatcher.server.TICK_MS", 10)  # between checks for connections that have ended
        yield Harness(stack)


def send_as_client(harness, batch):
    """Send messages in one session, or in as many as it takes."""
    waiting = list(batch)
    while waiting:
        with harness.client() as (dealer, session):
            sessions = (session, harness.bystander.session, 0, session + 1)
            while waiting and session in harness.server.peers.clients:
                try:
                    dealer.send_multipart(frames_of(waiting[-1], sessions), zmq.NOBLOCK)
                except zmq.Again:  # the server has closed the connection
                    harness.until(lambda: session not in harness.server.peers.clients)
                    break
                waiting.pop()
                while harness.server.turn(waits=False):
                    pass
                while dealer.poll(0):
                    found, _ = ANSWERS.decode(dealer.recv_multipart())
                    assert "mistake of GT" not in repr(found)
        harness.settle()


def send_as_worker(harness, batch):
    """Each message is the first one of a worker of its own, since a worker is dismissed for what it should not say."""
    for message in batch:
        with member(harness.port) as dealer:
            harness.greet(dealer, hello("worker", host="elsewhere", device="cpu", address="127.0.0.1"))
            dealer.send_multipart(frames_of(message, (harness.bystander.session, 0, 999)))
            harness.settle()
        deadline = time.monotonic() + 20
        while len(harness.server.dispatcher.state.workers) > 2 and time.monotonic() < deadline:
            harness.server.turn()


def check(harness, errors):
    """Nothing of ours has failed, and nobody else has noticed."""
    check_invariants(harness.server.dispatcher.state)
    assert [worker.poll() for worker in harness.workers] == [None, None]
    assert sorted(harness.server.dispatcher.state.workers)[:2] == [0, 1]
    harness.bystander.check()
    assert not errors, errors[0].getMessage() + str(errors[0].exc_info)


class Errors(logging.Handler):
    """Keeps the errors that GT logs: mistakes of its own."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.records = []

    def emit(self, record):
        self.records.append(record)


@contextlib.contextmanager
def noticed_errors():
    handler = Errors()
    logging.getLogger("gt").addHandler(handler)
    try:
        yield handler.records
    finally:
        logging.getLogger("gt").removeHandler(handler)


def draw_batches(send_all, kinds, largest, frames, number):
    """Call `send_all` with batches of so many frames together. `number` is the seed."""
    drawn = settings(
        max_examples=max(frames // PER_EXAMPLE, 1),
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    batches = st.lists(messages(kinds, largest), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE)
    seed(number)(drawn(given(batch=batches)(send_all)))()


def run(harness, count, kinds, send, largest):
    """Send so many frames. Memory, files and threads are those of before."""
    process = psutil.Process()
    sent = 0
    with noticed_errors() as errors:

        def send_all(batch):
            nonlocal sent
            send(harness, batch)
            check(harness, errors)
            sent += len(batch)

        send(harness, [])
        before = process.memory_info().rss, process.num_fds(), threading.active_count()
        for number in range(0, count, PER_DRAW):
            draw_batches(send_all, kinds, largest, min(count - number, PER_DRAW), number)
    gc.collect()
    harness.until(lambda: len(harness.server.dispatcher.state.sessions) == 1)
    assert sent >= count * 0.9
    assert process.memory_info().rss - before[0] < 300e6
    assert process.num_fds() <= before[1] + 20 and threading.active_count() <= before[2]
    owners = {session_of(ident) for ident in harness.server.dispatcher.state.tensors}
    assert owners <= {*harness.server.dispatcher.state.sessions}


def test_frames_of_a_client(harness):
    run(harness, 1_000, CLIENT_KINDS, send_as_client, 3)


def test_frames_of_a_worker(harness):
    run(harness, 20, WORKER_KINDS, send_as_worker, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_frames_of_a_client(harness):
    run(harness, 100_000, CLIENT_KINDS, send_as_client, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_frames_of_a_worker(harness):
    run(harness, 3_000, WORKER_KINDS, send_as_worker, 2)
