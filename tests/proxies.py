"""A TCP proxy on loopback whose connections can be reset, now or after some bytes, and can be silent for a while."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.subprocesses import server_keys


class Proxy:
    """Passes on bytes between `port` and a server's port, except while it is `silent`. A connection is reset after so
    many bytes in one direction as `limit` says when it begins (None: never). `resets` counts that."""

    def __init__(self, target: int, limit: Callable[[], int] | None = None) -> None:
        self.silent = threading.Event()
        self.resets = 0
        self._is_open = True
        self._limit = limit
        self._target = target
        self._ends: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=pair, daemon=True))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        left = self._limit() if self._limit is not None else None
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self.silent.is_set() and self._is_open:  # as a network does: bytes are late, not lost
                    time.sleep(0.01)
                target.sendall(data[:left])
                if left is not None and (left := left - len(data)) <= 0:
                    self.resets += 1
                    reset(source)
                    reset(target)
                    return

    def cut(self) -> None:
        """Reset all connections; new ones are accepted."""
        ends, self._ends = self._ends, []
        for end in ends:
            reset(end)
            end.close()

    def close(self) -> None:
        self._is_open = False
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=5)


def reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(port: int, limit: Callable[[], int] | None = None) -> Iterator[Proxy]:
    """A proxy of a server, whose keys are copied so that peers find them by the proxy's port."""
    directory = server_keys()
    proxy = Proxy(port, limit)
    host = socket.gethostname()
    shutil.copy(directory / f"{host}-{port}", directory / f"{host}-{proxy.port}")
    try:
        yield proxy
    finally:
        proxy.close()
