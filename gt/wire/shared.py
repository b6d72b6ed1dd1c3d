"""Memory shared by processes of one machine: segments that carry a tensor once, and cells that show progress.

A segment is made by the sender, and unlinked by the receiver as soon as it is mapped, so that nothing is left behind
when either dies later; what a dead process had not handed over is removed by `sweep`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import secrets
import tempfile
from pathlib import Path

from gt.core.errors import ProtocolError

SHARE_BYTES = 1 << 18  # below this a segment costs more than the copies it saves
_DIRECTORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_NAME = re.compile(r"gt-\d+-\d+-[0-9a-f]{16}")
_numbers = itertools.count()


def create(nbytes: int) -> tuple[str, memoryview]:
    """A new segment, readable by this user only."""
    name = f"gt-{os.getpid()}-{next(_numbers)}-{secrets.token_hex(8)}"
    descriptor = os.open(_DIRECTORY / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(descriptor, nbytes)
        return name, memoryview(mmap.mmap(descriptor, nbytes))
    except BaseException:
        os.unlink(_DIRECTORY / name)
        raise
    finally:
        os.close(descriptor)


def take(name: str, nbytes: int) -> memoryview:
    """Map a segment that a peer made and remove its name. Checked before anything is mapped."""
    if not _NAME.fullmatch(name):
        raise ProtocolError(f"{name!r} is not the name of a shared segment")
    try:
        descriptor = os.open(_DIRECTORY / name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise ProtocolError(f"segment {name} cannot be opened: {error}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_size != nbytes:
            raise ProtocolError(f"segment {name} has {status.st_size} bytes, not the {nbytes} announced")
        os.unlink(_DIRECTORY / name)
        return memoryview(mmap.mmap(descriptor, nbytes))
    finally:
        os.close(descriptor)


def sweep(pid: int) -> None:
    """Remove what a process has created and nobody has taken."""
    for path in _DIRECTORY.glob(f"gt-{pid}-*"):
        path.unlink(missing_ok=True)
