"""Many workers in one process that discard their commands, and answer only what the dispatcher waits for.

python -m benchmarks.comparison.peers.null_workers ENDPOINT COUNT
"""

from __future__ import annotations

import os
import sys

import zmq

from gt.core.messages import (
    Command,
    Hello,
    Progress,
    Refused,
    Report,
    StoreReady,
    Synchronize,
    Synchronized,
    Welcome,
    WorkerHostStore,
    WorkerReportProgress,
)
from gt.version import __version__
from gt.wire.codec import Decoder, encode
from gt.wire.file_descriptors import raise_open_files_limit
from gt.wire.process_identity import this_host
from gt.wire.sockets import open_socket, receive, send

WAIT_MS = 60_000
ANSWERED = (b"Synchronize", b"WorkerReportProgress", b"WorkerHostStore")  # the names of records, as on the wire
NANOSECONDS = 1000  # that a batch took, as a null worker says
COMMANDS: Decoder[Command | Welcome | Refused] = Decoder(Command | Welcome | Refused)


def answers(frames: list[bytes]) -> list[Report]:
    """A message without a record that is answered is not decoded."""
    if not any(name in frames[0] for name in ANSWERED):
        return []
    reports: list[Report] = []
    for command in COMMANDS.decode(frames)[0]:
        if isinstance(command, Synchronize):
            reports.append(Synchronized(command.request))
        elif isinstance(command, WorkerReportProgress):
            reports.append(Progress(command.mark, NANOSECONDS))
        elif isinstance(command, WorkerHostStore):
            reports.append(StoreReady(1))
    return reports


def main() -> None:
    endpoint, count = sys.argv[1], int(sys.argv[2])
    raise_open_files_limit()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * count + 16)
    sockets = [join(context, endpoint) for _ in range(count)]
    serve(sockets)
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def join(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Waits for the dispatcher's answer: more connections at once than it has room for in its queue would fail."""
    socket = open_socket(context, zmq.DEALER, WAIT_MS)
    socket.connect(endpoint)
    send(socket, encode([Hello(__version__, "worker", this_host(), os.getpid(), "cpu")]))
    frames = receive(socket)
    if frames is None:
        raise TimeoutError(f"the dispatcher did not answer in {WAIT_MS / 1000:g} s")
    if reports := answers(frames):
        send(socket, encode(reports))
    return socket


def serve(sockets: list[zmq.Socket[bytes]]) -> None:
    """Until the benchmark closes stdin."""
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    is_open = True
    while is_open:
        for ready, _ in poller.poll(WAIT_MS):
            if isinstance(ready, int):  # stdin
                is_open = False
                continue
            while (frames := receive(ready, waits=False)) is not None:
                if reports := answers(frames):
                    send(ready, encode(reports))


if __name__ == "__main__":
    main()
