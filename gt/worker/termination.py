"""Ends a worker at SIGTERM or Ctrl-C, even if its main thread is in native code and runs no signal handler."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

from gt.wire import shared_memory

GRACE_SECONDS = 5.0  # for the present batch
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def end_on_sigterm(stop: Callable[[], None]) -> None:
    """At SIGTERM call `stop`, which lets the process end after the batches that it has received. One that has not ended
    GRACE_SECONDS after that or after Ctrl-C, or when a second signal arrives, is ended by another thread. That thread
    also calls `stop`: the main thread runs no signal handler while it is in the middle of an op or waits for a peer."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: stop())
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_end_at_signal, args=(reading, stop), name="gt-sigterm", daemon=True).start()


def _wait_for_signal(signals: socket.socket) -> None:
    while _SIGNALS.isdisjoint(signals.recv(64)):
        pass


def _end_at_signal(signals: socket.socket, stop: Callable[[], None]) -> None:
    _wait_for_signal(signals)
    stop()
    signals.settimeout(GRACE_SECONDS)
    with contextlib.suppress(TimeoutError):
        _wait_for_signal(signals)
    try:
        shared_memory.end()
        shared_memory.sweep(os.getpid())
    finally:
        os._exit(1)
