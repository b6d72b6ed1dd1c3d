"""The actors that run GT's processes on the nodes of a Ray cluster. Only text and numbers pass between them and the
program. They need no torch."""

from __future__ import annotations

import os
import socket
import sys
import time

from gt.core.environment import load_extra
from gt.launch.commands import decode_command
from gt.launch.launched_process import GRACE_SECONDS, LaunchedProcess

_RETRY_SECONDS = 0.1


class WorkerActor:
    """Runs a worker, and ends with it: Ray then starts another actor in its place, which runs another worker. The end
    of a worker that has never joined is in `read_status` instead, and one that has ended well is not replaced."""

    def __init__(self, command: str) -> None:
        ray = load_extra("ray", "ray", "an actor")
        self._is_replacement = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._process = LaunchedProcess(decode_command(command), self._note_end)

    def _note_end(self, process: LaunchedProcess) -> None:
        status = process.read_status()
        if status.exit_code == 0 or (status.announced is None and not self._is_replacement):
            return
        sys.stderr.write(f"gt: the process {status.pid} of this actor {status.describe()}\n")
        sys.stderr.flush()
        process.stop()
        os._exit(1)

    def read_status(self) -> str:
        return self._process.encode_status()

    def stop(self) -> None:
        self._process.stop()


class ServerActor(WorkerActor):
    """Runs a server, at the same port when Ray has started the actor anew."""

    def __init__(self, command: str, host: str, port: int) -> None:
        _wait_until_free(host, port)
        super().__init__(command)


def find_place() -> tuple[str, int]:
    """The address of this node, and a port at which nobody listens."""
    host = load_extra("ray", "ray", "a task").util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, int(probe.getsockname()[1])


def _wait_until_free(host: str, port: int) -> None:
    """Wait for the end of the server of an actor that was killed. If it does not end in time, the next server says that
    it cannot listen."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                time.sleep(_RETRY_SECONDS)
            else:
                return
