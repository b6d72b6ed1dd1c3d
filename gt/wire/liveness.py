"""Whether a process of this machine is still there, and which machine this is."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache
def this_host() -> str:
    """Two processes with the same answer see the same processes and the same shared memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}-{boot}-{process_namespace()}"


@functools.cache
def process_namespace() -> int:
    """The namespace in which this process has its number; 0 where that cannot be found out."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_mark(pid: int) -> str:
    """When a process started, to tell it from a later one with the same number; empty if there is none. Raises OSError
    where that cannot be found out, as in a process that has too many files open."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()  # bytes: the name of a process need not be text
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = status.rpartition(b")")[2].decode().split()
    return "" if fields[0] in "ZX" else fields[19]


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger, and does nothing until it is continued."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def is_running(pid: int, mark: str) -> bool:
    """Whether a process has not ended, as far as this can be found out."""
    if Path("/proc").is_dir():
        try:
            return mark != "" and start_mark(pid) == mark
        except OSError:
            return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
