"""File descriptors: as many as the system allows, and connections that ZeroMQ holds closed one by one."""

from __future__ import annotations

import contextlib
import resource
import socket


def raise_limit() -> None:
    """Let this process open as many files as its hard limit allows. Every connection takes one, and ZeroMQ ends a
    program that can open no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # the system may allow fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def shut(descriptor: int) -> None:
    """End a connection without closing its descriptor, which ZeroMQ does when it sees the end."""
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
