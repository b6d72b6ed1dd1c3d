"""Files that only their user can read and write: keys.

Keys may also be in a secret that an orchestrator such as Kubernetes has mounted: files of root in a file system that is
mounted read-only, which root lets a group of this process read. There, names are links, which nobody can change.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from gt.core.errors import SettingsError


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter. Raises PermissionError for one that somebody else has made."""
    directory.mkdir(mode=0o700, exist_ok=True)
    if not is_private(directory):
        raise PermissionError(f"{directory} is not a private directory of this user")


def is_private(directory: Path) -> bool:
    """Whether this user, and nobody else, can enter an existing directory."""
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700


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


MAX_BYTES = 1 << 16
_ELSEWHERE = "set GT_KEYS to a directory of your own"
_Record = TypeVar("_Record", bound=msgspec.Struct)


def make_directory(path: Path) -> None:
    """Make a directory for keys, if there is none. Raises SettingsError if others can enter it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(path, path.lstat())
    except OSError as error:
        raise SettingsError(f"keys cannot be written: {error}; {_ELSEWHERE}") from None


def write_private(path: Path, record: msgspec.Struct) -> None:
    """Write a record to a file, in place of one with the same name. The directory is made if there is none."""
    make_directory(path.parent)
    draft = path.parent / f".{secrets.token_hex(8)}"
    try:
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(record))
        draft.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise SettingsError(f"keys cannot be written: {error}; {_ELSEWHERE}") from None


def write_new_private(path: Path, record: msgspec.Struct) -> None:
    """Write a record to a new file in any directory, to be copied to another machine."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(record))
    except OSError as error:
        raise SettingsError(f"the key cannot be written: {error}; give another file with --out") from None


def read_private(path: Path, kind: type[_Record]) -> _Record | None:
    """The record in a file; None if there is no such file. Raises SettingsError if others can read or write it."""
    try:
        path = follow_mounted(path)
        require_private(path.parent, path.parent.lstat())
        text = _read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SettingsError(f"keys in {path} cannot be read: {error}; {_ELSEWHERE}") from None
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} does not hold keys: {error}; remove it and make it again") from None


def _read_file(path: Path) -> bytes:
    """The bytes of a private file. Raises SettingsError for anything else: a pipe would wait for its writer."""
    found = path.lstat()
    require_private(path, found)
    if not stat.S_ISREG(found.st_mode):
        raise SettingsError(f"{path} is not a file, and so no key; remove it")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        require_private(path, os.fstat(descriptor))
        return file.read(MAX_BYTES)


def require_private(path: Path, status: os.stat_result) -> None:
    """Raise SettingsError for a file that other users can read, which lets them join, or write, which lets them pose as
    the server."""
    if stat.S_ISLNK(status.st_mode):
        raise SettingsError(f"{path} is a link, and keys are not looked for where a link leads; {_ELSEWHERE}")
    is_own = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
    if not is_own and not _is_mounted_secret(path, status):
        raise SettingsError(
            f"{path} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, but keys must be out "
            f"of reach of others; make it yours with mode 700 for directories and 600 for files, or set GT_KEYS to "
            f"another directory"
        )


def follow_mounted(path: Path) -> Path:
    """The path of the same file without links, if root has made its directory and nobody can write there; links of
    other directories are not followed."""
    try:
        found = path.parent.lstat()
        is_fixed = stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and is_read_only(path.parent)
    except OSError:
        return path
    return Path(os.path.realpath(path)) if is_fixed else path


def is_read_only(path: Path) -> bool:
    """Whether a file is in a file system that is mounted read-only: also its owner cannot change it."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _is_mounted_secret(path: Path, status: os.stat_result) -> bool:
    """Whether root, who has mounted a file, has given it to a group of this process, and to nobody else. The names in a
    directory are no secret, and cannot be changed."""
    if status.st_uid != 0 or not is_read_only(path):
        return False
    if stat.S_ISDIR(status.st_mode):
        return True
    is_of_group = status.st_gid in (os.getegid(), *os.getgroups())
    return stat.S_ISREG(status.st_mode) and is_of_group and not stat.S_IMODE(status.st_mode) & 0o037
