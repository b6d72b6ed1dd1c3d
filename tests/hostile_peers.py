"""A server with workers and a healthy client beside, and peers of the kinds that it refuses."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
import zmq
from prometheus_client.parser import text_string_to_metric_families

from gt.core.messages import Answer, Hello, Instruction, Refused, Waiting, Welcome
from gt.version import __version__
from gt.wire.codec import Decoder, encode
from gt.wire.process_identity import this_host
from gt.wire.server_keys import find_keys
from tests.subprocesses import find_port, finish, running, server_keys, start, start_interpreter, wait_for_workers
from tests.web_dashboard.requests import ask

ANSWERS: Decoder[Any] = Decoder(Answer | Welcome | Refused | Waiting)

HEALTHY = """
import signal, time, threading, torch, gt
gt.connect("localhost:{port}")
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
torch.manual_seed(0)
host = torch.randn(64, 64)
kept, expected = gt.to(host), (host @ host.T).relu().sum().item()
print("began", flush=True)
count, longest = 0, 0.0
while not ended.wait(0.01):
    start = time.monotonic()
    value = (kept @ kept.T).relu().sum().item()
    longest = max(longest, time.monotonic() - start)
    count += 1
    assert abs(value - expected) <= 1e-4 * abs(expected), (value, expected)
assert torch.equal(kept.cpu(), host)
gt.shutdown()
print(count, longest, flush=True)
"""


class Target(NamedTuple):
    """A server that is to be disturbed: its process, its port, and the port and token of its dashboard."""

    process: Any
    port: int
    dashboard: int
    token: str

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def refused(self) -> dict[str, int]:
        """The refusals by kind, as `/metrics` tells them."""
        text = ask(self.dashboard, "/metrics", Authorization=f"Bearer {self.token}").body.decode()
        families = text_string_to_metric_families(text)
        samples = [sample for family in families for sample in family.samples if sample.name == "gt_refused_total"]
        return {sample.labels["kind"]: int(sample.value) for sample in samples}

    def memory(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@contextlib.contextmanager
def target(workers: int = 1, **environment: str) -> Iterator[Target]:
    main = start_interpreter("-m", "gt.server", "-p", "0", "--dashboard", "0", **environment)
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(main))
        port = find_port(main, server_keys())
        dashboard, token = _read_address(main)
        started = [start("-m", "gt.worker", "-p", str(port), "--threads", "1") for _ in range(workers)]
        stack.enter_context(running(*started))
        wait_for_workers(port, workers)
        yield Target(main, port, dashboard, token)
        assert main.poll() is None
        assert [each.poll() for each in started] == [None] * workers, "a worker has ended"


def _read_address(server: Any) -> tuple[int, str]:
    for line in server.stderr:
        if found := re.search(r"dashboard at http://127.0.0.1:(\d+)/\?token=(\S+)", line):
            return int(found[1]), found[2]
    raise AssertionError("the server has printed no address")


@contextlib.contextmanager
def healthy_client(port: int, longest: float) -> Iterator[None]:
    """A program that computes all the time, with the right results and within a time each."""
    program = start("-c", HEALTHY.format(port=port))
    with running(program):
        assert program.stdout.readline() == "began\n"
        yield
        program.terminate()
        code, out, err = finish(program, 60)
        assert code == 0, err
        count, slowest = out.split()[-2:]
        assert int(count) > 0 and float(slowest) < longest, out


@contextlib.contextmanager
def member(port: int, key: tuple[bytes, bytes] | None = None, server: bytes = b"", **options: Any) -> Iterator[Any]:
    """A connection with the keys of a member, or with other ones."""
    keys = find_keys(server_keys(), f"tcp://127.0.0.1:{port}")
    assert keys is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 20_000)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        for name, value in options.items():
            dealer.setsockopt(getattr(zmq, name), value)
        public, secret = key or (keys.public.encode(), keys.secret.encode())
        dealer.curve_serverkey = server or keys.server.encode()
        dealer.curve_publickey, dealer.curve_secretkey = public, secret
        dealer.connect(f"tcp://127.0.0.1:{port}")
        yield dealer


def hello(role: str = "client", host: str | None = None, **fields: Any) -> Hello:
    """As a peer of this machine would send it, unless another host is given."""
    return Hello(__version__, role, host or this_host(), psutil.Process().pid, **fields)


def greet(dealer: Any, sent: Hello | None = None) -> Welcome:
    dealer.send_multipart(encode([sent or hello()]))
    while True:
        for answer in ANSWERS.decode(dealer.recv_multipart())[0]:
            if isinstance(answer, Welcome):
                return answer
            assert isinstance(answer, Waiting), answer


def answer_to(dealer: Any, *instructions: Instruction, payloads: Any = ()) -> list[Any]:
    """Send a batch; the records of the next message that comes."""
    dealer.send_multipart(encode(instructions, payloads))
    return list(ANSWERS.decode(dealer.recv_multipart())[0])
