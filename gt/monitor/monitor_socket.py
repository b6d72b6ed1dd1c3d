"""The monitor socket of a program: tools attach to it from outside.

A thread sleeps until a tool connects; a program that nobody looks at pays nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice

from gt.core.errors import GTError
from gt.core.message_events import Captures
from gt.monitor.monitor_protocol import (
    RECORDS_AT_ONCE,
    Refusal,
    Request,
    TraceAnswer,
    monitor_directory,
    receive_request,
    require_same_user,
    send_record,
)
from gt.monitor.records import Record, records_of
from gt.wire.private_directories import make_private

log = logging.getLogger("gt.monitor")
MAX_TOOLS = 8  # that are attached at the same time
REQUEST_SECONDS = 10.0
CLOSE_SECONDS = 1.0
MAX_SECONDS = 3600.0  # of one capture
MAX_LIMIT = 1 << 22  # records of one capture
WORKER_SECONDS = 20.0  # that a capture waits for the workers' commands


class MonitorSocket:
    """Listens in a private directory of the user; `captures` are those of the program's dispatcher. A server has the
    port at which it serves in the name of its monitor socket. A program that cannot listen goes on without one."""

    def __init__(self, captures: Captures, port: int = 0) -> None:
        self._captures = captures
        self._pid = os.getpid()
        self._tools = threading.BoundedSemaphore(MAX_TOOLS)
        self._path = monitor_directory() / f"{self._pid}-{port}-{secrets.token_hex(4)}.sock"
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._attached: dict[socket.socket, threading.Thread] = {}
        try:
            make_private(self._path.parent)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(self._path))
            self._listener.listen(8 * MAX_TOOLS)  # those over the limit are told so
        except OSError as error:
            log.info("there is no monitor socket: %s", error)
            self.close()
            return
        self._thread = threading.Thread(target=self._listen, name="gt-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if os.getpid() == self._pid:  # a fork shares the socket with its parent
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._path.unlink(missing_ok=True)
            if self._thread is not None:
                self._thread.join(CLOSE_SECONDS)
            for connection, thread in list(self._attached.items()):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                thread.join(CLOSE_SECONDS)
        listener.close()

    def _listen(self) -> None:
        while (listener := self._listener) is not None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if not self._tools.acquire(blocking=False):
                with contextlib.suppress(OSError), connection:
                    send_record(connection, Refusal(f"{MAX_TOOLS} tools are attached already"))
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="gt-monitor-tool", daemon=True)
            self._attached[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one tool. Nothing that it does ends the program."""
        try:
            with connection:
                connection.settimeout(REQUEST_SECONDS)
                require_same_user(connection)
                self._answer(connection, receive_request(connection))
        except GTError as error:
            log.info("a monitoring tool was refused: %s", error)
        except OSError as error:
            log.info("a monitoring tool has gone: %s", error)
        except Exception:
            log.exception("a monitoring tool could not be answered")
        finally:
            self._attached.pop(connection, None)
            self._tools.release()

    def _answer(self, connection: socket.socket, request: Request) -> None:
        try:
            self._captures.begin(min(max(request.limit, 1), MAX_LIMIT))
        except GTError as error:
            send_record(connection, Refusal(str(error)))
            return
        try:
            _wait(connection, min(max(request.seconds, 0.0), MAX_SECONDS))
        finally:
            captured = self._captures.end(WORKER_SECONDS)
        connection.settimeout(WORKER_SECONDS)
        for records in _batches(records_of(captured.events)):
            send_record(connection, TraceAnswer(records))
        send_record(connection, TraceAnswer([], is_last=True, dropped=captured.dropped, missing=captured.missing))


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    remaining = iter(records)
    while batch := list(islice(remaining, RECORDS_AT_ONCE)):
        yield batch


def _wait(connection: socket.socket, seconds: float) -> None:
    """Wait so many seconds, or until the tool says or ends anything."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        with contextlib.suppress(TimeoutError):
            connection.recv(1)  # any byte, and the end of the connection, ends a capture early
            return
