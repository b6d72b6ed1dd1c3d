"""File descriptors: raises their limit, and the connections of a ZeroMQ socket behind them."""

from __future__ import annotations

import contextlib
import resource
import socket


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


def shut_down(descriptor: int) -> None:
    """End a connection. ZeroMQ, which owns its descriptor, closes that when it notices the end."""
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()


def peer_address(descriptor: int) -> str:
    """The IP address of the other end of a connection; "" if it has ended, or has none."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return ""
    try:
        name = connection.getpeername()
    except OSError:
        return ""
    finally:
        connection.detach()
    return str(name[0]) if isinstance(name, tuple) else ""
