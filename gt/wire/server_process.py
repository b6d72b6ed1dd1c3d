"""Whether the process of a server has ended, as far as its clients can tell."""

from __future__ import annotations

import contextlib
import socket

from gt.core.errors import ServerLost
from gt.wire.addresses import NotResolved, resolve
from gt.wire.process_identity import is_running, start_mark

_CONNECT_SECONDS = 2.0


class ServerProcess:
    """The process of the server at an endpoint. Its pid is noted if it is one of this machine."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._pid, self._mark = 0, ""

    def note(self, pid: int) -> None:
        self._pid, self._mark = pid, start_mark(pid)

    def has_ended(self) -> bool:
        """False for a process of another machine."""
        return bool(self._pid) and not is_running(self._pid, self._mark)

    def refuses_connections(self) -> bool:
        """Whether its machine answers that nothing listens at its port."""
        host, _, port = self.endpoint.removeprefix("tcp://").rpartition(":")
        with contextlib.suppress(NotResolved, OSError):
            try:
                socket.create_connection((resolve(host), int(port)), _CONNECT_SECONDS).close()
            except ConnectionRefusedError:
                return True
        return False

    def describe_end(self) -> ServerLost:
        pid = f" (pid {self._pid})" if self._pid else ""
        return ServerLost(f"the server at {self.endpoint}{pid} has ended; the session and its tensors are lost")
