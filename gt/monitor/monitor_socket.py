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
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from gt.core.errors import GTError
from gt.core.message_events import Captures
from gt.core.program_view import ProgramStatus
from gt.monitor.activity import Record, records_of
from gt.monitor.monitor_protocol import (
    RECORDS_AT_ONCE,
    Refusal,
    Request,
    StatusAnswer,
    StatusRequest,
    TraceAnswer,
    TraceRequest,
    receive_request,
    require_same_user,
    send_record,
)
from gt.wire.private_files import make_private, monitor_directory, remove_socket

log = logging.getLogger("gt.monitor")
MAX_TOOLS = 8  # tools that are attached at the same time
REQUEST_SECONDS = 10.0
CLOSE_SECONDS = 1.0
LAST_ANSWER_SECONDS = 5.0  # longest wait at the end of a program for tools to take their last answers
SHORTEST_INTERVAL = 0.05  # seconds between two answers about the status
MAX_SECONDS = 3600.0  # duration of one capture
MAX_LIMIT = 1 << 22  # records of one capture
WORKER_SECONDS = 20.0  # wait of a capture for the workers' commands


class MonitorSocket:
    """Listens in a private directory of the user; `captures` and `read_status` are those of the program's dispatcher. A
    server has the port at which it serves in the name of its monitor socket. A program that cannot listen goes on
    without one. `note_threads` is called when the number of threads changes, by a thread that runs before and after."""

    def __init__(
        self,
        captures: Captures,
        read_status: Callable[[], ProgramStatus],
        port: int = 0,
        note_threads: Callable[[int], None] = lambda change: None,
    ) -> None:
        self._note_threads = note_threads
        self._noting = threading.Lock()
        self._captures = captures
        self._read_status = read_status
        self._pid = os.getpid()
        self._tools = threading.BoundedSemaphore(MAX_TOOLS)
        self._name = f"{self._pid}-{port}-{secrets.token_hex(4)}.sock"
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._attached: dict[socket.socket, threading.Thread] = {}
        try:
            make_private(monitor_directory())
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(monitor_directory() / self._name))
            self._listener.listen(8 * MAX_TOOLS)  # tools over the limit get an answer that says so
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
            remove_socket(self._name)
            if self._thread is not None:
                self._thread.join(CLOSE_SECONDS)
            self._end_tools()
        listener.close()

    def _end_tools(self) -> None:
        """Let each tool have its last answer, then end its connection."""
        attached = list(self._attached.items())
        for connection, _ in attached:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # wakes the thread, as if the tool had said that it has enough
        deadline = time.monotonic() + LAST_ANSWER_SECONDS
        for connection, thread in attached:
            thread.join(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(CLOSE_SECONDS)

    @contextlib.contextmanager
    def _noted_thread(self) -> Iterator[None]:
        with self._noting:
            self._note_threads(1)
        try:
            yield
        finally:
            with self._noting:
                self._note_threads(-1)

    def _listen(self) -> None:
        with self._noted_thread():
            self._accept()

    def _accept(self) -> None:
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
            with self._noted_thread(), connection:
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
        if isinstance(request, StatusRequest):
            self._tell_status(connection, request.interval)
        else:
            self._capture(connection, request)

    def _tell_status(self, connection: socket.socket, interval: float) -> None:
        """Tell the status until the tool goes or the program ends."""
        is_ended = not interval > 0
        while not is_ended:
            send_record(connection, StatusAnswer(self._read_status()))
            is_ended = _is_ended(connection, min(max(interval, SHORTEST_INTERVAL), MAX_SECONDS))
            connection.settimeout(REQUEST_SECONDS)
        send_record(connection, StatusAnswer(self._read_status(), is_last=True))

    def _capture(self, connection: socket.socket, request: TraceRequest) -> None:
        try:
            self._captures.begin(min(max(request.limit, 1), MAX_LIMIT))
        except GTError as error:
            send_record(connection, Refusal(str(error)))
            return
        try:
            _is_ended(connection, min(max(request.seconds, 0.0), MAX_SECONDS))
        finally:
            captured = self._captures.end(WORKER_SECONDS if self._listener is not None else CLOSE_SECONDS)
        connection.settimeout(WORKER_SECONDS)
        for records in _batches(records_of(captured.events)):
            send_record(connection, TraceAnswer(records))
        send_record(connection, TraceAnswer([], is_last=True, dropped=captured.dropped, missing=captured.missing))


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    remaining = iter(records)
    while batch := list(islice(remaining, RECORDS_AT_ONCE)):
        yield batch


def _is_ended(connection: socket.socket, seconds: float) -> bool:
    """Wait `seconds`, or until the tool sends anything or ends; returns whether it did."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        with contextlib.suppress(TimeoutError):
            connection.recv(1)
            return True
    return False
