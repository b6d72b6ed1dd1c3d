"""The directory that a compile server and its workers share: sources, code and a socket."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

SOCKET = "socket"
LOG = "log"
_LOCK = "lock"


def shared_directory(endpoint: str) -> Path:
    """The directory of the workers of this user that join the server at an endpoint."""
    name = hashlib.sha256(endpoint.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"gt-compile-{os.getuid()}-{name}"


def own_directory() -> Path:
    """A directory for this process alone."""
    return Path(tempfile.gettempdir()) / f"gt-compile-{os.getuid()}-{os.getpid()}-{time.monotonic_ns():x}"


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter. Raises PermissionError for one that somebody else has made."""
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise PermissionError(f"{directory} is not a private directory of this user")


def lock(directory: Path) -> int | None:
    """The descriptor of the lock of a directory, which its compile server holds; None if another one has it."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
