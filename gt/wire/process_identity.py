"""Identifies this machine, and tells whether a process of it still runs."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from pathlib import Path

from gt.core.errors import ServerLost
from gt.core.signatures import as_name
from gt.wire.addresses import NotResolved, resolve

_MAX_PROGRAM = 100  # characters of a name


@functools.cache
def this_host() -> str:
    """The identity of this machine: processes with the same one see the same pids and the same shared memory. Its parts
    are the start of the kernel, the pid namespace and the file system of `/dev/shm`: two containers of a machine differ
    in the second or third, and two machines of one name in the first."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return as_name(socket.gethostname())
    return f"{boot}-{process_namespace()}-{_shared_file_system()}"


def host_name() -> str:
    """The name of this machine, for people."""
    return socket.gethostname()


def _shared_file_system() -> int:
    """The device number of `/dev/shm`, which each mount of it has to itself; 0 if there is none."""
    try:
        return os.stat("/dev/shm").st_dev
    except OSError:
        return 0


@functools.cache
def process_namespace() -> int:
    """The pid namespace of this process; 0 if it is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@functools.cache
def _has_proc() -> bool:
    return Path("/proc").is_dir()


def _read_status(pid: int) -> bytes:
    """The status line of a process: bytes, because its name need not be valid UTF-8. Not by a Path: a server reads the
    status of all its peers several times a second."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as status:
        return status.read()


def start_mark(pid: int) -> str:
    """The start time of a process, which distinguishes it from a later one with the same pid; "" if it has ended.
    Raises OSError if it cannot be read, for example because this process has too many files open."""
    try:
        status = _read_status(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = status.rpartition(b")")[2].decode().split()
    return "" if fields[0] in "ZX" else fields[19]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return _read_status(pid).rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def is_running(pid: int, mark: str) -> bool:
    """Whether the process with this pid and start mark still runs; True if that is not known."""
    if _has_proc():
        try:
            return mark != "" and start_mark(pid) == mark
        except OSError:
            return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def program_name() -> str:
    """The name of the program that this process runs, for people."""
    name = os.path.basename(sys.argv[0] if sys.argv else "")
    if name == "__main__.py":
        name = f"{os.path.basename(os.path.dirname(sys.argv[0]))} (-m)"
    return as_name(name or "python")[:_MAX_PROGRAM]


_CONNECT_SECONDS = 2.0


class ServerProcess:
    """The process of the server at an endpoint. Its pid is noted if it is one of this machine."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._pid, self._mark = 0, ""

    def note(self, pid: int) -> None:
        self._pid, self._mark = pid, start_mark(pid)

    def has_ended(self) -> bool:
        """False for a process of another machine."""
        return bool(self._pid) and not is_running(self._pid, self._mark)

    def refuses_connections(self) -> bool:
        """Whether its machine answers that nothing listens at its port."""
        host, _, port = self.endpoint.removeprefix("tcp://").rpartition(":")
        with contextlib.suppress(NotResolved, OSError):
            try:
                socket.create_connection((resolve(host), int(port)), _CONNECT_SECONDS).close()
            except ConnectionRefusedError:
                return True
        return False

    def describe_end(self) -> ServerLost:
        pid = f" (pid {self._pid})" if self._pid else ""
        return ServerLost(f"the server at {self.endpoint}{pid} has ended; the session and its tensors are lost")
