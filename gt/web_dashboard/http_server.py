"""Serves a dashboard from a thread of the program, by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import html
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gt.core.errors import SettingsError
from gt.core.program_view import ProgramView
from gt.web_dashboard.access import HAS_TOKEN
from gt.web_dashboard.app import make_app
from gt.web_dashboard.watcher import ProgramWatcher
from gt.wire.file_descriptors import connection_limit, log_without_traceback

log = logging.getLogger("gt.dashboard")
HOST = "127.0.0.1"
MAX_CONNECTIONS, FILES_SHARE = 128, 16  # most connections, and share of the files that the process may open
REQUEST_SECONDS = 10.0  # within which a connection sends its first request
MAX_HEADERS = 1 << 14  # bytes
CLOSE_SECONDS = 3.0


class _BoundedProtocol(H11Protocol):
    """Ends connections over the limit, which would take the files that the program may open, and those that say
    nothing. The oldest without the token is ended, so that strangers leave room for who has it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._began = time.monotonic()
        present = [each for each in self.connections if isinstance(each, _BoundedProtocol) and not each.is_ending]
        if len(present) > connection_limit(MAX_CONNECTIONS, FILES_SHARE):
            min(present, key=lambda each: (each._has_token, each._began)).transport.abort()
        asyncio.get_running_loop().call_later(REQUEST_SECONDS, self._end_if_silent)

    @property
    def is_ending(self) -> bool:
        return self.transport.is_closing()

    @property
    def _has_token(self) -> bool:
        """Whether the latest request has shown the token."""
        return dict(self.scope or {}).get(HAS_TOKEN) is True

    def _end_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


class _Server(uvicorn.Server):
    """Sleeps until it is stopped, where uvicorn wakes up ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stopping.wait()


class Dashboard:
    """A web page that shows what this program does; `url` is its address, with the token that it needs. A link to it is
    shown in a notebook."""

    def __init__(self, view: ProgramView, port: int, token: str, note_threads: Callable[[int], None]) -> None:
        self._view = view
        self._token = token or secrets.token_urlsafe(24)
        self._note_threads = note_threads
        self._pid = os.getpid()
        self._socket = _listen(port)
        self.port: int = self._socket.getsockname()[1]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._watcher: ProgramWatcher | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gt-dashboard", daemon=True)
        self._thread.start()
        self._ready.wait(CLOSE_SECONDS)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self._token}"

    def __repr__(self) -> str:
        return f"<dashboard at {self.url}>"

    def _repr_html_(self) -> str:
        url = html.escape(self.url)
        return f'<a href="{url}" target="_blank" rel="noopener">Dashboard of GT at {HOST}:{self.port}</a>'

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive() and os.getpid() == self._pid

    def close(self) -> None:
        """Tell the viewers that the program has ended, and serve no more."""
        if not self.is_open or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(CLOSE_SECONDS)

    def leave_to_parent(self) -> None:
        """After a fork: close the copies of the parent's sockets, so that they end with the parent."""
        self._socket.close()
        connections = list(self._server.server_state.connections) if self._server is not None else []
        nothing = os.open(os.devnull, os.O_RDWR)
        for connection in connections:
            with contextlib.suppress(OSError, AttributeError):
                # The number stays taken: the object that has it would close what is opened under it later.
                os.dup2(nothing, connection.transport.get_extra_info("socket").fileno())
        os.close(nothing)

    # In the thread

    def _run(self) -> None:
        self._note_threads(1)
        try:
            asyncio.run(self._serve())
        except Exception:  # the program goes on without its dashboard
            log.exception("the dashboard has ended")
        finally:
            self._ready.set()
            self._socket.close()
            self._note_threads(-1)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(log_without_traceback)
        self._watcher = ProgramWatcher(self._view)
        app = make_app(self._view, self._watcher, self._token, self.port)
        self._server = _Server(_config(app))
        watching = asyncio.create_task(self._watcher.run())
        self._ready.set()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            watching.cancel()
            self._watcher.stop()

    def _stop(self) -> None:
        assert self._watcher is not None and self._server is not None
        self._watcher.ended.set()
        self._server.stopping.set()


def _config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="asyncio",
        http=_BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=connection_limit(MAX_CONNECTIONS, FILES_SHARE),
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEADERS,
    )


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(connection_limit(MAX_CONNECTIONS, FILES_SHARE))
    except (OSError, OverflowError) as error:
        listener.close()
        raise SettingsError(
            f"a dashboard cannot listen at {HOST}:{port}: {error}; choose another port, or 0 for any free one"
        ) from None
    return listener
