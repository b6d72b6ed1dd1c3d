"""File descriptors: raises their limit, shares it out, and the connections of a ZeroMQ socket behind them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio  # clients need none

log = logging.getLogger("gt.dispatcher")
_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_CREDENTIALS = struct.Struct("=3i")  # Linux's `struct ucred`: pid, user and group
_LAST_RECEIVED = struct.Struct("=52xI")  # tcpi_last_data_recv of Linux's `struct tcp_info`, in ms


def raise_open_files_limit() -> None:
    """Let this process open as many files as its hard limit allows. Every connection takes one, and ZeroMQ aborts a
    process that can open no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # the system may allow fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files_limit() -> int:
    """The number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def connection_limit(most: int, share: int) -> int:
    """The connections that a listener takes: `most`, or one of `share` files where the process may open few."""
    return max(min(most, open_files_limit() // share), 1)


def log_without_traceback(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of an event loop: one of the system, such as a lack of files, in one line, since strangers can
    cause it as often as they like."""
    error = context.get("exception")
    if isinstance(error, OSError):
        log.warning("a connection was not accepted: %s", error)
    else:
        loop.default_exception_handler(context)


@contextlib.contextmanager
def borrowed(descriptor: int) -> Generator[socket.socket]:
    """A connection that ZeroMQ owns. Raises OSError for a descriptor of none, such as -1, of one that has ended."""
    if descriptor < 0:
        raise OSError(errno.EBADF, "this connection has ended")
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def shut_down(descriptor: int) -> None:
    """End a connection. ZeroMQ, which owns its descriptor, closes that when it notices the end."""
    with contextlib.suppress(OSError), borrowed(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def shut_down_connections(address: str, port: int) -> None:
    """End all connections of this process to a port, so that waits for the other end fail."""
    with contextlib.suppress(OSError):  # this system does not list descriptors
        for name in os.listdir("/proc/self/fd"):
            if _other_end(int(name)) == (address, port):
                shut_down(int(name))


def peer_address(descriptor: int) -> str:
    """The IP address of the other end of a connection; "" if it has ended, or has none."""
    return _other_end(descriptor)[0]


def peer_process(descriptor: int) -> int:
    """The pid of the process that has opened a connection within this machine, as the kernel says; 0 if that is not
    known, as of TCP."""
    with contextlib.suppress(OSError, AttributeError), borrowed(descriptor) as connection:  # the option is Linux's
        if connection.family == socket.AF_UNIX:
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return int(_CREDENTIALS.unpack(found)[0])
    return 0


def seconds_of_silence(descriptor: int) -> float | None:
    """The time since the last bytes came over a TCP connection; None if that is not known."""
    with contextlib.suppress(OSError, struct.error), borrowed(descriptor) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LAST_RECEIVED.size)
        return float(_LAST_RECEIVED.unpack(info)[0]) / 1000
    return None


def _other_end(descriptor: int) -> tuple[str, int]:
    """The address and the port of the other end of a connection. One of IPv4 may be written as one of IPv6."""
    with contextlib.suppress(OSError), borrowed(descriptor) as connection:
        name = connection.getpeername()
        return (str(name[0]).removeprefix("::ffff:"), int(name[1])) if isinstance(name, tuple) else ("", 0)
    return "", 0
