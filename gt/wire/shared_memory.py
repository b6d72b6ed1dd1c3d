"""Memory shared by processes of one machine: shared buffers with the tensors of a session, and those that show a
worker's progress.

A client removes the names of its shared buffers (`shared_buffer_pool.py`); a cell of progress is unlinked by the server
as soon as it is mapped. Shared buffers of a dead process are removed by `sweep`, or by `sweep_dead` if all processes
that knew of them have ended.

The name of a shared buffer has the pid of the process that made it, its pid namespace, a count and a seal.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import mmap
import os
import re
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from gt.core.errors import ProtocolError
from gt.wire.process_identity import process_namespace, start_mark

SHARE_BYTES = 1 << 18  # below this a shared buffer costs more than the copies it saves


def _find_directory() -> Path:
    if Path("/dev/shm").is_dir():
        return Path("/dev/shm")
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # without a directory no shared buffer can be made, and bytes go with the messages
        return Path("/dev/shm")


_DIRECTORY = _find_directory()
_IS_LOCAL = Path("/dev/shm") == _DIRECTORY  # another directory may be one that several machines share
_NAME = re.compile(r"gt-(\d+)-(\d+)-\d+-[0-9a-f]{16}")
_numbers = itertools.count()
_making = threading.Lock()
_ended = threading.Event()


def create(
    nbytes: int, fill: Callable[[memoryview], None] = lambda data: None, session_secret: str = ""
) -> tuple[str, memoryview]:
    """A new shared buffer, readable by this user only, that `fill` has written to. `session_secret` seals its name.

    Raises OSError if there is no space: all pages are reserved, since a write to a missing one would kill this
    process. Reserving costs no time, because the pages are needed in any case. A shared buffer that could not be filled
    is removed.
    """
    stem = f"gt-{os.getpid()}-{process_namespace()}-{next(_numbers)}"
    name = f"{stem}-{_seal(stem, session_secret) if session_secret else secrets.token_hex(8)}"
    with _making:
        if _ended.is_set():
            raise OSError(errno.ESHUTDOWN, "this process ends and makes no more shared buffers")
        descriptor = os.open(_DIRECTORY / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        _reserve(descriptor, nbytes)
        data = memoryview(mmap.mmap(descriptor, nbytes))
        fill(data)
        return name, data
    except BaseException:
        os.unlink(_DIRECTORY / name)
        raise
    finally:
        os.close(descriptor)


def is_made_with(name: str, session_secret: str) -> bool:
    """Whether a shared buffer belongs to the session with this secret. All users of the machine can see the names, so
    knowing one proves nothing."""
    stem, _, seal = name.rpartition("-")
    return hmac.compare_digest(_seal(stem, session_secret), seal)


def _seal(stem: str, session_secret: str) -> str:
    return hmac.digest(session_secret.encode(), stem.encode(), "sha256").hex()[:16]


def _reserve(descriptor: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def take(name: str, nbytes: int) -> memoryview:
    """Map a shared buffer that a peer has made, and remove its name. Name, owner and size are checked before."""
    data = _map(name)
    if data.nbytes != nbytes:
        raise ProtocolError(f"shared buffer {name} has {data.nbytes} bytes, not the {nbytes} announced")
    os.unlink(_DIRECTORY / name)
    return data


def _map(name: str) -> memoryview:
    """Map a shared buffer that a peer has made. All its pages are reserved, since a write to a missing one would kill
    this process."""
    try:
        descriptor = os.open(path_of(name), os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise ProtocolError(f"shared buffer {name} cannot be opened: {error}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            raise ProtocolError(f"shared buffer {name} is not a file of this user", "foreign")
        _reserve(descriptor, status.st_size)
        return memoryview(mmap.mmap(descriptor, status.st_size))
    except (OSError, ValueError) as error:  # too many mappings; or an empty file, which cannot be mapped
        raise ProtocolError(f"shared buffer {name} of {status.st_size} bytes cannot be mapped: {error}") from None
    finally:
        os.close(descriptor)


def path_of(name: str) -> Path:
    """The file of a shared buffer. Raises ProtocolError for a name that is not one."""
    require_name(name)
    return _DIRECTORY / name


def require_name(name: str) -> None:
    """Raises ProtocolError for a path, and for any other name that is not one of a shared buffer."""
    if not _NAME.fullmatch(name):
        raise ProtocolError(f"{name!r} is not the name of a shared buffer", "name")


class AttachedBuffers:
    """The shared buffers of clients that this process has mapped. They stay mapped until their names are removed, which
    is noticed when the next one is mapped."""

    def __init__(self) -> None:
        self._mapped: dict[str, memoryview] = {}

    def view(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Bytes of a shared buffer. Name, owner and size are checked before."""
        if name not in self._mapped:
            self._mapped = {known: data for known, data in self._mapped.items() if path_of(known).exists()}
            self._mapped[name] = _map(name)
        data = self._mapped[name]
        if offset + nbytes > data.nbytes:
            raise ProtocolError(f"shared buffer {name} has {data.nbytes} bytes, and {offset + nbytes} were announced")
        return data[offset : offset + nbytes]


def end() -> None:
    """Make no more shared buffers: this process is about to sweep its own for the last time."""
    with _making:
        _ended.set()


def sweep(pid: int) -> None:
    """Remove the shared buffers that a process has made and none has taken. All users of the machine may write to the
    directory, so files of other names, and files that cannot be removed, are skipped."""
    for path in _DIRECTORY.glob(f"gt-{pid}-*"):
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def sweep_dead() -> None:
    """Remove the shared buffers of processes of this user that have ended.

    The shared buffers of a pid that runs are kept, although it may be a later process with the same pid. So are those
    of other pid namespaces, whose processes this one cannot see. Nothing is opened: directories, links and pipes of
    such names are left alone.
    """
    namespace = process_namespace()
    if not namespace or not _IS_LOCAL:
        return
    with contextlib.suppress(OSError), os.scandir(_DIRECTORY) as entries:
        for entry in entries:
            name = _NAME.fullmatch(entry.name)
            if name is not None and int(name[2]) == namespace:
                with contextlib.suppress(OSError):
                    _remove_if_dead(entry, int(name[1]))


def _remove_if_dead(entry: os.DirEntry[str], pid: int) -> None:
    status = entry.stat(follow_symlinks=False)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not start_mark(pid):
        os.unlink(entry.path)
