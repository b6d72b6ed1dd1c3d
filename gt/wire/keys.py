"""The keys of servers: who can read them may join.

A server that listens at a TCP port makes new keys when it starts, and writes what its clients and workers need into a
file of a directory that only its user can enter. They look there for the port that they connect to. The directory is
GT_KEYS, or `.gt/keys` in the user's home.
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
from gt.wire.liveness import is_running, start_mark, this_host


class ServerKeys(msgspec.Struct, frozen=True):
    """What only the server has: its secret, and the public key of those that it lets in."""

    secret: str
    member: str


class MemberKeys(msgspec.Struct, frozen=True):
    """What the clients and workers of a server have: its public key, their own, and which process it is."""

    server: str
    public: str
    secret: str
    host: str
    pid: int
    mark: str


def make_keys() -> tuple[ServerKeys, MemberKeys]:
    """For a server in this process."""
    server, secret = [key.decode() for key in zmq.curve_keypair()]
    public, member_secret = [key.decode() for key in zmq.curve_keypair()]
    pid = os.getpid()
    return ServerKeys(secret, public), MemberKeys(server, public, member_secret, this_host(), pid, start_mark(pid))


def keys_directory(setting: str) -> Path:
    """`setting` is GT_KEYS, empty where it is not set. Raises SettingsError where the user has no home then."""
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
    """In place of those that a server before left at this port."""
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
    """Unless another server has replaced them."""
    with contextlib.suppress(SettingsError, OSError):
        if _read(directory, endpoint) == keys:
            _path(directory, endpoint).unlink()


def find_keys(directory: Path, endpoint: str) -> MemberKeys | None:
    """None where no server of this user has written any, or the one that did is gone."""
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
    """Keys that others can write let them pose as the server, and keys that others can read let them join."""
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise SettingsError(
            f"{path} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, but keys must be out "
            f"of reach of others; make it yours with mode 700 for directories and 600 for files, or set GT_KEYS to "
            f"another directory"
        )


def _path(directory: Path, endpoint: str) -> Path:
    """By host and port: the directory may be on a disk that several machines share."""
    return directory / f"{socket.gethostname()}-{endpoint.rpartition(':')[2]}"
