"""What the hops of a read from a worker process cost alone: from a client over a server to a worker and back, by the
sockets that GT uses, with nothing done at any of them.

    python benchmarks/echo.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from gt.wire.sockets import open_socket, receive, send

WAIT_MS = 10_000
NOTE, END = bytes(64), b""  # a note is as long as the messages of a small read
CLIENT, WORKER = b"client", b"worker"


@contextmanager
def echoing() -> Iterator[Callable[[], object]]:
    """Gives a function that makes one round."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/echo"
        others = [subprocess.Popen([sys.executable, __file__, role, endpoint]) for role in ("server", "worker")]
        with zmq.Context() as context, joined(context, endpoint, CLIENT) as socket:
            try:
                hear(socket)
                yield lambda: (send(socket, [NOTE]), hear(socket))
            finally:
                send(socket, [END])
                for other in others:
                    other.wait(WAIT_MS / 1000)


def joined(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: bytes) -> zmq.Socket[bytes]:
    socket = open_socket(context, zmq.DEALER, WAIT_MS)
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.connect(endpoint)
    send(socket, [NOTE])
    return socket


def hear(socket: zmq.Socket[bytes]) -> list[bytes]:
    message = receive(socket)
    if message is None:
        raise TimeoutError(f"nothing came in {WAIT_MS / 1000:g} s")
    return message


def serve(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    """Pass on what comes, once both others are there."""
    with open_socket(context, zmq.ROUTER, WAIT_MS) as socket:
        socket.bind(endpoint)
        hear(socket), hear(socket)
        send(socket, [CLIENT, NOTE])
        note = NOTE
        while note != END:
            sender, note = hear(socket)
            send(socket, [WORKER if sender == CLIENT else CLIENT, note])


def work(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    with joined(context, endpoint, WORKER) as socket:
        while (message := hear(socket)) != [END]:
            send(socket, message)


def main() -> None:
    if len(sys.argv) > 1:
        role, endpoint = sys.argv[1:]
        with zmq.Context() as context:
            (serve if role == "server" else work)(context, endpoint)
        return
    with echoing() as echo:
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(200):
                echo()
            print(f"{(time.perf_counter() - start) / 200 * 1e6:.0f} us a round")


if __name__ == "__main__":
    main()
