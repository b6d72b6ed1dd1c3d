"""Directories that only this user can enter, for the sockets and files of programs that find each other by name."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter. Raises PermissionError for one that somebody else has made."""
    directory.mkdir(mode=0o700, exist_ok=True)
    if not is_private(directory):
        raise PermissionError(f"{directory} is not a private directory of this user")


def is_private(directory: Path) -> bool:
    """Whether this user, and nobody else, can enter an existing directory."""
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
