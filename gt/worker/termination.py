"""Ends a worker at SIGTERM or Ctrl-C, even if its main thread is in native code and runs no signal handler."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

from gt.wire import shared_memory

ENDING_SECONDS = 2.0  # part of a worker's time that is left for ending when its tensors were not moved in time
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def end_on_sigterm(leave: Callable[[], None], stop: Callable[[], None], seconds: float) -> None:
    """At SIGTERM call `leave`, which lets the process end when its tensors are with other workers. One that takes too
    long for that, or that gets Ctrl-C, has to `stop` after its present batch; after `seconds` in all, or when a
    second signal arrives, it is ended by another thread. That thread also calls `leave`: the main thread runs no signal
    handler while it is in the middle of an op or waits for a peer."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: leave())
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    arguments = (reading, leave, stop, seconds)
    threading.Thread(target=_end_at_signal, args=arguments, name="gt-sigterm", daemon=True).start()


def _wait_for_signal(signals: socket.socket) -> int:
    while not (found := _SIGNALS.intersection(signals.recv(64))):
        pass
    return found.pop()


def _end_at_signal(signals: socket.socket, leave: Callable[[], None], stop: Callable[[], None], seconds: float) -> None:
    ending = min(ENDING_SECONDS, seconds / 2)
    try:
        if _wait_for_signal(signals) == signal.SIGTERM:
            leave()
            signals.settimeout(seconds - ending)
            with contextlib.suppress(TimeoutError):
                _wait_for_signal(signals)
                ending = 0.0
        stop()
        if ending:
            signals.settimeout(ending)
            with contextlib.suppress(TimeoutError):
                _wait_for_signal(signals)
    finally:
        _end_now()


def _end_now() -> None:
    try:
        shared_memory.end()
        shared_memory.sweep(os.getpid())
    finally:
        os._exit(1)
