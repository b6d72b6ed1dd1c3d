"""The keys of servers, in files that only their user can read. A process that can read them may join.

A server that listens at a TCP port makes new keys when it starts, and writes the member keys, for clients and workers
of the same machine and user, to a file that is named by its port, in a directory that only its user can enter. The
directory is GT_KEYS, or `.gt/keys` in the user's home. Servers that other machines reach have keys that last as well:
`cluster_keys.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import Annotated

import msgspec
import zmq
from zmq.utils import z85

from gt.core.errors import SettingsError
from gt.wire.addresses import is_loopback
from gt.wire.private_files import (
    follow_mounted,
    make_directory,
    read_private,
    require_private,
    write_new_private,
    write_private,
)
from gt.wire.process_identity import is_running, start_mark, this_host


class ServerKeys(msgspec.Struct, frozen=True):
    """The keys of a server: its secret key, and the public key of its members. `directory` has the client keys that are
    also admitted, if other machines reach the server."""

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
    """New keys for a server in this process. A server that other machines reach has its own key, and admits the client
    keys of a `directory`."""
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


# `python -m gt.keys` makes them. The directory of keys (GT_KEYS, or `.gt/keys` in the user's home) has on the
# server's machine the file `server.key` and the directory `authorized`, with a file for each client key that is let
# in. On the machines of clients and workers it has the file `client.key`.


SERVER_FILE = "server.key"
CLIENT_FILE = "client.key"
AUTHORIZED = "authorized"
MAX_AUTHORIZED = 4096  # files that a server reads
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KeyText = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class ServerKey(msgspec.Struct, frozen=True):
    """The key pair of a server."""

    public: KeyText
    secret: KeyText


class ClientKey(msgspec.Struct, frozen=True):
    """The key pair of clients and workers, and the public key of the server that they join."""

    name: str
    server: KeyText
    public: KeyText
    secret: KeyText


class AuthorizedKey(msgspec.Struct, frozen=True):
    """A public key that a server admits."""

    public: KeyText


def make_server_key(directory: Path, *, replaces: bool = False) -> ServerKey:
    """Make the key of the servers that use a directory. Raises SettingsError if there is one already."""
    if not replaces and read_server_key(directory) is not None:
        raise SettingsError(
            f"{directory / SERVER_FILE} exists already; with another key, no client key that was made for it is of "
            f"use any more: add --replace to make one all the same"
        )
    key = new_server_key()
    make_directory(directory)
    make_directory(directory / AUTHORIZED)
    write_private(directory / SERVER_FILE, key)
    return key


def new_server_key() -> ServerKey:
    """A key that is in no file."""
    return ServerKey(*_new_pair())


def new_client_key(name: str, server: ServerKey) -> ClientKey:
    """A key for a server, which is in no file and is not admitted yet."""
    _require_name(name)
    return ClientKey(name, server.public, *_new_pair())


def read_server_key(directory: Path) -> ServerKey | None:
    return read_private(directory / SERVER_FILE, ServerKey)


def make_client_key(directory: Path, name: str) -> ClientKey:
    """A new client key for the server of a directory, which admits it from now on."""
    server = read_server_key(directory)
    if server is None:
        raise SettingsError(f"there is no {directory / SERVER_FILE}; make it with: python -m gt.keys server")
    _require_new(directory, name)
    key = new_client_key(name, server)
    authorize(directory, name, key.public)
    return key


def write_client_key(path: Path, key: ClientKey) -> None:
    """Write a client key to a new file, to be copied to other machines."""
    write_new_private(path, key)


def read_client_key(directory: Path) -> ClientKey | None:
    return read_private(directory / CLIENT_FILE, ClientKey)


def authorize(directory: Path, name: str, public: str) -> None:
    """Admit a client key that was made elsewhere. A key has one name: once that is revoked, no other one may still
    admit it."""
    _require_new(directory, name)
    require_public_key(public)
    known = read_authorized(directory).get(public)
    if known is not None:
        raise SettingsError(f"this key is admitted already, as {known!r}")
    write_private(directory / AUTHORIZED / name, AuthorizedKey(public))


def revoke(directory: Path, name: str) -> None:
    """Stop admitting a client key. Connections that it has already stay."""
    _require_name(name)
    try:
        (directory / AUTHORIZED / name).unlink()
    except FileNotFoundError:
        known = ", ".join(read_authorized(directory).values()) or "none"
        raise SettingsError(f"there is no client key {name!r} in {directory / AUTHORIZED}; known: {known}") from None
    except OSError as error:
        raise SettingsError(f"the client key {name!r} cannot be revoked: {error}; remove that by hand") from None


def read_authorized(directory: Path) -> dict[str, str]:
    """The names of the admitted client keys, by their public keys. A file that others can read or write, or that
    holds no key, raises SettingsError."""
    try:
        place = follow_mounted(directory / AUTHORIZED)
        require_private(place, place.lstat())
        names = sorted(entry.name for entry in os.scandir(place) if _NAME.fullmatch(entry.name))[:MAX_AUTHORIZED]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(
            f"client keys cannot be read: {error}; make {AUTHORIZED} anew, and the keys in it"
        ) from None
    found = {name: read_private(place / name, AuthorizedKey) for name in names}
    return {key.public: name for name, key in found.items() if key is not None}


def require_public_key(text: str) -> None:
    try:
        valid = len(z85.decode(text.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeEncodeError, IndexError):
        valid = False
    if not valid or len(text) != 40:
        raise SettingsError(f"{text[:80]!r} is not a public key, which has 40 characters: python -m gt.keys show")


def _require_new(directory: Path, name: str) -> None:
    _require_name(name)
    if os.path.lexists(directory / AUTHORIZED / name):
        raise SettingsError(f"there is a client key {name!r} already; choose another name, or: gt.keys revoke {name}")


def _require_name(name: str) -> None:
    """A name becomes the name of a file."""
    if not _NAME.fullmatch(name):
        raise SettingsError(f"{name!r} is not a name of a key: use up to 64 letters, digits, '.', '_' and '-'")


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
