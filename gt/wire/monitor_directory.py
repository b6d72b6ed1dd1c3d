"""The private directory with the monitor sockets of this user's programs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def monitor_directory() -> Path:
    """Raises FileNotFoundError if there is no directory for temporary files."""
    return Path(tempfile.gettempdir()) / f"gt-monitor-{os.getuid()}"


def remove_socket(pattern: str) -> None:
    """Remove the monitor sockets with names of a pattern, and the directory if it is empty then."""
    with contextlib.suppress(OSError):
        directory = monitor_directory()
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)
        directory.rmdir()


def remove_sockets_of(pid: int) -> None:
    """Remove the monitor socket of a process that has ended."""
    remove_socket(f"{pid}-*.sock")
