"""What the hops of a read from a worker process cost alone: to the worker and back, by the sockets that GT uses, with
nothing done at either end.

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


@contextmanager
def echoing(workers: int = 1) -> Iterator[Callable[[], object]]:
    """Gives a function that makes one round: to all workers at once, and back from all."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        endpoint = f"ipc://{folder}/echo"
        with open_socket(context, zmq.ROUTER, WAIT_MS) as socket:
            socket.bind(endpoint)
            processes = [subprocess.Popen([sys.executable, __file__, endpoint]) for _ in range(workers)]
            try:
                names = [hear(socket)[0] for _ in processes]
                yield lambda: (send_all(socket, names, NOTE), [hear(socket) for _ in names])
                send_all(socket, names, END)
                for process in processes:
                    process.wait(WAIT_MS / 1000)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()


def send_all(socket: zmq.Socket[bytes], names: list[bytes], note: bytes) -> None:
    for name in names:
        send(socket, [name, note])


def hear(socket: zmq.Socket[bytes]) -> list[bytes]:
    message = receive(socket)
    if message is None:
        raise TimeoutError(f"nothing came in {WAIT_MS / 1000:g} s")
    return message


def work(endpoint: str) -> None:
    with zmq.Context() as context, open_socket(context, zmq.DEALER, WAIT_MS) as socket:
        socket.connect(endpoint)
        send(socket, [NOTE])
        while (message := hear(socket)) != [END]:
            send(socket, message)


def main() -> None:
    if len(sys.argv) > 1:
        work(sys.argv[1])
        return
    with echoing() as echo:
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(200):
                echo()
            print(f"{(time.perf_counter() - start) / 200 * 1e6:.0f} us a round")


if __name__ == "__main__":
    main()
