"""The keys of servers, in files that only their user can read. A process that can read them may join.

A server that listens at a TCP port makes new keys when it starts, and writes the member keys, for clients and workers,
to a file that is named by its port, in a directory that only its user can enter. The directory is GT_KEYS, or
`.gt/keys` in the user's home.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from pathlib import Path

import msgspec
import zmq

from gt.core.errors import SettingsError
from gt.wire.process_identity import is_running, start_mark, this_host


class ServerKeys(msgspec.Struct, frozen=True):
    """The keys that only the server has: its secret key, and the public key of its members."""

    secret: str
    member: str


class MemberKeys(msgspec.Struct, frozen=True):
    """The keys of a server's clients and workers: the server's public key and their own pair; and the server's process,
    to notice its end."""

    server: str
    public: str
    secret: str
    host: str
    pid: int
    mark: str


def make_keys() -> tuple[ServerKeys, MemberKeys]:
    """New keys for a server in this process."""
    server, secret = [key.decode() for key in zmq.curve_keypair()]
    public, member_secret = [key.decode() for key in zmq.curve_keypair()]
    pid = os.getpid()
    return ServerKeys(secret, public), MemberKeys(server, public, member_secret, this_host(), pid, start_mark(pid))


def keys_directory(setting: str) -> Path:
    """The directory of keys; `setting` is GT_KEYS, or "". Raises SettingsError if neither it nor a home exists."""
    if setting:
        return Path(setting)
    try:
        return Path.home() / ".gt" / "keys"
    except RuntimeError:
        raise SettingsError(
            "there is no directory for keys: HOME is not set and the user has no home; set GT_KEYS to a directory of "
            "your own"
        ) from None


def write_keys(directory: Path, endpoint: str, keys: MemberKeys) -> None:
    """Write the keys of a server, in place of those of an earlier server at the same port."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(directory, directory.lstat())
        draft = directory / f".{secrets.token_hex(8)}"
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(keys))
        draft.rename(_path(directory, endpoint))
    except OSError as error:
        raise SettingsError(f"keys cannot be written: {error}; set GT_KEYS to a directory of your own") from None


def remove_keys(directory: Path, endpoint: str, keys: MemberKeys) -> None:
    """Remove the keys of a server, unless another server has replaced them."""
    with contextlib.suppress(SettingsError, OSError):
        if _read(directory, endpoint) == keys:
            _path(directory, endpoint).unlink()


def find_keys(directory: Path, endpoint: str) -> MemberKeys | None:
    """The keys of the server at an endpoint; None if this user has no server there, or it has ended."""
    if not endpoint.startswith("tcp:"):
        return None
    keys = _read(directory, endpoint)
    if keys is None or (keys.host == this_host() and not is_running(keys.pid, keys.mark)):
        return None
    return keys


def _read(directory: Path, endpoint: str) -> MemberKeys | None:
    path = _path(directory, endpoint)
    try:
        _require_private(directory, directory.lstat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SettingsError(f"keys in {path} cannot be read: {error}; set GT_KEYS to a directory of your own") from None
    with os.fdopen(descriptor, "rb") as file:
        _require_private(path, os.fstat(descriptor))
        try:
            return msgspec.json.decode(file.read(1 << 16), type=MemberKeys)
        except msgspec.DecodeError as error:
            raise SettingsError(f"{path} does not hold keys: {error}; remove it and start the server again") from None


def _require_private(path: Path, status: os.stat_result) -> None:
    """Raise SettingsError for a file that other users can read, which lets them join, or write, which lets them pose as
    the server."""
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise SettingsError(
            f"{path} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, but keys must be out "
            f"of reach of others; make it yours with mode 700 for directories and 600 for files, or set GT_KEYS to "
            f"another directory"
        )


def _path(directory: Path, endpoint: str) -> Path:
    """The file of a server's keys. The name has the host, because machines may share the directory."""
    return directory / f"{socket.gethostname()}-{endpoint.rpartition(':')[2]}"
