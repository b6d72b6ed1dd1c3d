"""The directory that a compile server and its workers share: sources, code and a socket."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

SOCKET = "socket"
LOG = "log"
PROCESS = "process"
SERVER_LOCK = "lock"
WORKERS_LOCK = "workers"


def shared_directory(endpoint: str) -> Path:
    """The directory of the workers of this user that join the server at an endpoint."""
    name = hashlib.sha256(endpoint.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"gt-compile-{os.getuid()}-{name}"


def own_directory() -> Path:
    """A directory for this process alone."""
    return Path(tempfile.gettempdir()) / f"gt-compile-{os.getuid()}-{os.getpid()}-{time.monotonic_ns():x}"


def lock(directory: Path, name: str, *, is_shared: bool = False) -> int | None:
    """The descriptor of a lock of a directory; None if another process has it, or has removed the directory."""
    descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(directory / name)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
