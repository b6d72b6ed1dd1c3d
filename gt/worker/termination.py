"""Ends a worker at SIGTERM, even if its main thread is blocked in native code and runs no signal handler."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

from gt.wire import shared_memory

GRACE_SECONDS = 5.0  # for the present batch


def end_on_sigterm(stop: Callable[[], None]) -> None:
    """At SIGTERM call `stop`, which lets the main thread end after the batches that it has received. A process that has
    not ended GRACE_SECONDS after that, or when a second SIGTERM arrives, is ended by another thread: the main thread
    runs no signal handler while a process group waits for a peer."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: stop())
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_end_at_signal, args=(reading,), name="gt-sigterm", daemon=True).start()


def _wait_for_sigterm(signals: socket.socket) -> None:
    while signal.SIGTERM not in signals.recv(64):
        pass


def _end_at_signal(signals: socket.socket) -> None:
    _wait_for_sigterm(signals)
    signals.settimeout(GRACE_SECONDS)
    with contextlib.suppress(TimeoutError):
        _wait_for_sigterm(signals)
    try:
        shared_memory.end()
        shared_memory.sweep(os.getpid())
    finally:
        os._exit(1)
