"""A TCP proxy on loopback whose connections can be reset, or stop to pass on bytes for a while."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.subprocesses import server_keys


class Proxy:
    """Passes on bytes between `port` and a server's port, except while it is `silent`."""

    def __init__(self, target: int) -> None:
        self.silent = threading.Event()
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
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.silent.is_set():
                    target.sendall(data)

    def cut(self) -> None:
        """Reset all connections; new ones are accepted."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=5)


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """A proxy of a server, whose keys are copied so that peers find them by the proxy's port."""
    directory = server_keys()
    proxy = Proxy(port)
    host = socket.gethostname()
    shutil.copy(directory / f"{host}-{port}", directory / f"{host}-{proxy.port}")
    try:
        yield proxy
    finally:
        proxy.close()
