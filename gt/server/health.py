"""The `/health` endpoint of a server, for systems that watch whether it serves: Kubernetes, a load balancer.

The answer is `ok`, or 503 if the server's loop does not turn; it says nothing else, and needs no key. Everything that
a stranger can make the server hold is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

from gt.core.errors import SettingsError
from gt.wire.file_descriptors import connection_limit, log_without_traceback

STALLED_SECONDS = 10.0  # without a turn of the loop, which is four times a second at least
REQUEST_SECONDS = 5.0  # time for a whole request
MAX_REQUEST = 1 << 13  # bytes
MAX_CONNECTIONS, FILES_SHARE = 32, 64  # most connections, and share of the files that the process may open
_CLOSE_SECONDS = 3.0
_OK = (200, "OK", "ok\n")
_STALLED = (503, "Service Unavailable", "the server's loop does not turn\n")
_NOT_FOUND = (404, "Not Found", "there is /health here, and nothing else\n")
_NOT_ALLOWED = (405, "Method Not Allowed", "this can only be read\n")


class HealthEndpoint:
    """Answers at an address and port, in a separate thread, until `close`. `turned_at` gives the time of the last
    turn of the server's loop. Raises SettingsError if it cannot listen there."""

    def __init__(self, address: str, port: int, turned_at: Callable[[], float]) -> None:
        self._turned_at = turned_at
        self._limit = connection_limit(MAX_CONNECTIONS, FILES_SHARE)
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(log_without_traceback)
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, address, port, limit=MAX_REQUEST, backlog=self._limit)
            )
        except (OSError, OverflowError) as error:
            self._loop.close()
            raise SettingsError(
                f"--health-port: cannot listen at {address}:{port}: {error}; choose another port, or 0 for any free one"
            ) from None
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="gt-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)

    # In the thread

    def _run(self) -> None:
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The oldest connection over the limit is ended, so that silent ones leave room for a probe."""
        if len(self._open) >= self._limit:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            with contextlib.suppress(OSError, asyncio.LimitOverrunError, asyncio.IncompleteReadError, TimeoutError):
                async with asyncio.timeout(REQUEST_SECONDS):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(request))
                    await writer.drain()
        finally:
            self._open.pop(writer, None)
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
        status, reason, text = self._choose(method, rest.partition(b" ")[0].partition(b"?")[0])
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\n"
            f"cache-control: no-store\r\nconnection: close\r\n\r\n"
        )
        return (head + ("" if method == b"HEAD" else text)).encode()

    def _choose(self, method: bytes, path: bytes) -> tuple[int, str, str]:
        if method not in (b"GET", b"HEAD"):
            return _NOT_ALLOWED
        if path != b"/health":
            return _NOT_FOUND
        return _OK if time.monotonic() - self._turned_at() < STALLED_SECONDS else _STALLED
