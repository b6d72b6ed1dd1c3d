"""Files that are written by a name that the user gives, maybe in a directory where others can write, such as /tmp.

There, another user may have put a link of that name, which leads to a file of this user, or a file of his own. Neither
is written: links are followed only if this user or root has made them, or nobody else can have.
"""

from __future__ import annotations

import os
import stat
from io import TextIOWrapper
from pathlib import Path, PurePath
from typing import BinaryIO, cast

_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40
_ADVICE = "another user may have put it there; remove it, or give a name in a directory of your own"


def open_text(path: str | Path, mode: str = "w") -> TextIOWrapper:
    """A file of text to write ("w") or to append to ("a"). Raises OSError, as for all functions of this module, for a
    file that another user may have put there."""
    return cast("TextIOWrapper", os.fdopen(open_output(path, mode), mode, buffering=1 << 16, encoding="utf-8"))


def open_binary(path: str | Path, permissions: int = 0o666) -> BinaryIO:
    """A file of bytes to write. `permissions` are those of a new file."""
    return cast("BinaryIO", os.fdopen(open_output(path, permissions=permissions), "wb"))


def make_parents(path: str | Path) -> None:
    """Make the directories of a file that do not exist."""
    directory, _ = _find(Path(path), makes_directories=True)
    os.close(directory)


def open_output(path: str | Path, mode: str = "w", permissions: int = 0o666) -> int:
    """A descriptor of a file to write, which is made if there is none, and emptied unless it is appended to ("a")."""
    directory, name = _find(Path(path), makes_directories=False)
    try:
        if _is_descriptor(name, directory):
            descriptor = os.open(name, _WRITE & ~os.O_NOFOLLOW, dir_fd=directory)
        else:
            descriptor = _open(name, directory, os.O_APPEND if mode == "a" else 0, path, permissions)
    except OSError as error:
        raise _named(error, path) from None
    finally:
        os.close(directory)
    if mode == "w" and stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.ftruncate(descriptor, 0)
    return descriptor


def _find(path: Path, makes_directories: bool) -> tuple[int, str]:
    """The directory of a file, opened, and the file's name there: links are replaced by what they lead to."""
    names = list(reversed(path.absolute().parts[1:]))
    directory, links = os.open("/", _DIRECTORY), 0
    try:
        while True:
            name = names.pop() if names else "."
            found = _status(name, directory)
            if found is not None and stat.S_ISLNK(found.st_mode) and not _is_descriptor(name, directory):
                links += 1
                target = _read_link(name, directory, found, path, links)
                names += reversed([part for part in target.parts if part != "/"])
                if target.is_absolute():
                    directory = _replace(directory, os.open("/", _DIRECTORY))
                continue
            if not names:
                return directory, name
            if found is None and makes_directories:
                os.mkdir(name, dir_fd=directory)
            follows = os.O_NOFOLLOW if found is not None and stat.S_ISLNK(found.st_mode) else 0
            directory = _replace(directory, os.open(name, _DIRECTORY & ~follows, dir_fd=directory))
    except OSError as error:
        os.close(directory)
        raise _named(error, path) from None


def _named(error: OSError, path: str | Path) -> OSError:
    """An error of the system with the name that the user gave."""
    if error.errno is not None:
        error.filename = str(path)
    return error


def _read_link(name: str, directory: int, found: os.stat_result, path: Path, links: int) -> PurePath:
    if links > _MAX_LINKS:
        raise OSError(f"{path} has too many links")
    if found.st_uid not in (os.geteuid(), 0) and _is_shared(directory):
        raise PermissionError(f"{path} is reached by the link {name!r} of user {found.st_uid}; {_ADVICE}")
    return PurePath(os.readlink(name, dir_fd=directory))


def _open(name: str, directory: int, flags: int, path: str | Path, permissions: int) -> int:
    """Open a file that was found, or make one. One that appears at the same time is looked at again."""
    while True:
        found = _status(name, directory)
        try:
            if found is None:
                return os.open(name, _WRITE | flags | os.O_CREAT | os.O_EXCL, permissions, dir_fd=directory)
            _require_own(found, directory, path)  # before it is opened: to open a pipe waits for its reader
            descriptor = os.open(name, _WRITE | flags, dir_fd=directory)
        except (FileExistsError, FileNotFoundError) as error:
            if found is None and isinstance(error, FileNotFoundError):  # the directory was removed
                raise
            continue
        try:
            _require_own(os.fstat(descriptor), directory, path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _require_own(found: os.stat_result, directory: int, path: str | Path) -> None:
    """Raise PermissionError for a file or a pipe of somebody else in a shared directory, and for a second name that
    somebody else may have given to a file of this user."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)) or not _is_shared(directory):
        return
    status = os.fstat(directory)
    trusted = {os.geteuid(), *([] if status.st_mode & _OTHERS_WRITE else [status.st_uid])}
    if found.st_uid not in trusted or found.st_nlink > 1:
        raise PermissionError(f"{path} belongs to user {found.st_uid} and has {found.st_nlink} names; {_ADVICE}")


def _is_shared(directory: int) -> bool:
    """Whether other users can put files into a directory."""
    status = os.fstat(directory)
    return status.st_uid not in (os.geteuid(), 0) or bool(status.st_mode & _OTHERS_WRITE)


def _is_descriptor(name: str, directory: int) -> bool:
    """Whether a name is that of an open file of this process, such as /dev/stdout: only the kernel can follow it."""
    try:
        is_in_proc = os.fstat(directory).st_dev == os.stat("/proc").st_dev
        return is_in_proc and name.isdecimal() and stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode)
    except OSError:
        return False


def _status(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return None


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new
