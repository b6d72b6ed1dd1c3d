"""The keys of servers, in files that only their user can read. A process that can read them may join.

A server that listens at a TCP port makes new keys when it starts, and writes the member keys, for clients and workers
of the same machine and user, to a file that is named by its port, in a directory that only its user can enter. The
directory is GT_KEYS, or `.gt/keys` in the user's home. Servers that other machines reach have keys that last as well:
`cluster_keys.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec
import zmq

from gt.core.errors import SettingsError
from gt.wire.addresses import is_loopback
from gt.wire.cluster_keys import ServerKey, read_client_key
from gt.wire.private_files import read_private, write_private
from gt.wire.process_identity import is_running, start_mark, this_host


class ServerKeys(msgspec.Struct, frozen=True):
    """The keys of a server: its secret key, and the public key of its members. `directory` has the client keys that are
    let in besides, if other machines reach the server."""

    secret: str
    member: str
    directory: Path | None = None


class MemberKeys(msgspec.Struct, frozen=True):
    """The keys of a server's clients and workers: the server's public key and their own pair; and the server's process,
    to notice its end, if it is one of this machine (`pid` 0: not known)."""

    server: str
    public: str
    secret: str
    host: str = ""
    pid: int = 0
    mark: str = ""


def make_keys(server: ServerKey | None = None, directory: Path | None = None) -> tuple[ServerKeys, MemberKeys]:
    """New keys for a server in this process. A server that other machines reach has a key of its own, and lets in the
    client keys of a `directory`."""
    if server is None:
        server = ServerKey(*[key.decode() for key in zmq.curve_keypair()])
    public, member_secret = [key.decode() for key in zmq.curve_keypair()]
    pid = os.getpid()
    members = MemberKeys(server.public, public, member_secret, this_host(), pid, start_mark(pid))
    return ServerKeys(server.secret, public, directory), members


def keys_directory(setting: str) -> Path:
    """The directory of keys; `setting` is GT_KEYS, or "". Raises SettingsError if neither it nor a home exists."""
    try:
        if setting:
            return Path(setting).expanduser()
        return Path.home() / ".gt" / "keys"
    except RuntimeError:
        raise SettingsError(
            "there is no directory for keys: HOME is not set and the user has no home; set GT_KEYS to a directory of "
            "your own"
        ) from None


def write_keys(directory: Path, endpoint: str, keys: MemberKeys) -> None:
    """Write the keys of a server, in place of those of an earlier server at the same port."""
    write_private(_path(directory, endpoint), keys)


def remove_keys(directory: Path, endpoint: str, keys: MemberKeys) -> None:
    """Remove the keys of a server, unless another server has replaced them."""
    with contextlib.suppress(SettingsError, OSError):
        if _read(directory, endpoint) == keys:
            _path(directory, endpoint).unlink()


def find_keys(directory: Path, endpoint: str) -> MemberKeys | None:
    """The keys for the server at an endpoint, whose host is an address; None if this user has none. A server of this
    machine has written its own; for others there is a client key."""
    if not endpoint.startswith("tcp:"):
        return None
    keys = _read(directory, endpoint)
    if keys is not None and keys.host == this_host() and not is_running(keys.pid, keys.mark):
        keys = None
    if keys is not None and is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0]):
        return keys
    client = read_client_key(directory)
    if client is not None:
        return MemberKeys(client.server, client.public, client.secret)
    return keys if keys is not None and keys.host == this_host() else None


def _read(directory: Path, endpoint: str) -> MemberKeys | None:
    return read_private(_path(directory, endpoint), MemberKeys)


def _path(directory: Path, endpoint: str) -> Path:
    """The file of a server's keys. The name has the host, because machines may share the directory."""
    return directory / f"{socket.gethostname()}-{endpoint.rpartition(':')[2]}"
