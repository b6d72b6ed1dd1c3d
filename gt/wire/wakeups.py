"""Waiting for messages of a ZeroMQ socket that several threads use."""

from __future__ import annotations

import contextlib
import os
import select
import threading

LONGEST_WAIT_MS = 50  # defers Ctrl-C, and periodic checks


class MessageWait:
    """Lets one thread wait for messages of a socket, which others may use meanwhile. All methods but `wait` are called
    with the lock of the socket held, which is `lock`.

    The socket's descriptor becomes readable once when something happens, and every use of the socket consumes that. So
    the waiting thread looks for messages before it waits, and a thread that has used the socket wakes it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._poller = select.poll()
        self._poller.register(self._reading, select.POLLIN)
        self._descriptor = -1
        self._is_waiting = False
        self._closed = False

    def begin(self) -> None:
        """The next call of this thread is `wait`, after the lock was released. There is no message now."""
        self._is_waiting = True

    def wait(self, descriptor: int) -> None:
        """Wait for something to happen at a socket with this `zmq.FD`, or for `wake`."""
        if descriptor != self._descriptor:  # a new connection, after one was lost
            if self._descriptor >= 0:
                self._poller.unregister(self._descriptor)
            self._poller.register(descriptor, select.POLLIN)
            self._descriptor = descriptor
        try:
            self._poller.poll(LONGEST_WAIT_MS)
        finally:
            with self._lock:
                self._is_waiting = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self._reading, 64)
                if self._closed:
                    self._close()

    def wake(self) -> None:
        """The socket was used. Hot path: does nothing where no thread waits."""
        if self._is_waiting:
            with contextlib.suppress(BlockingIOError):  # it is full: the thread wakes anyway
                os.write(self._writing, b"\0")

    def close(self) -> None:
        """A thread that waits closes the descriptors when it wakes."""
        if self._closed:
            return
        self._closed = True
        if self._is_waiting:
            self.wake()
        else:
            self._close()

    def _close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)
