"""The keys of a server or a worker that a launcher starts, as text that the launcher passes to another machine.

A server that a launcher starts has its own keys, made for it and removed with it. What passes the launcher's
transport, which may not be encrypted, is typed JSON text; each machine writes it to a private directory.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from gt.core.errors import SettingsError
from gt.wire.private_files import write_private
from gt.wire.server_keys import (
    CLIENT_FILE,
    SERVER_FILE,
    ClientKey,
    ServerKey,
    authorize,
    find_keys,
    make_client_key,
    make_server_key,
)

_NAME = "launched"


class NodeKeys(msgspec.Struct, frozen=True):
    """The keys of one process: a worker has a client key, a server both. Without encryption there are none."""

    client: ClientKey | None = None
    server: ServerKey | None = None

    def to_text(self) -> str:
        return msgspec.json.encode(self).decode()

    def for_workers(self) -> NodeKeys:
        return NodeKeys(self.client)


def make_node_keys() -> NodeKeys:
    """New keys for a server, its workers and its clients."""
    with tempfile.TemporaryDirectory(prefix="gt-") as name:
        directory = Path(name) / "keys"
        server = make_server_key(directory)
        return NodeKeys(make_client_key(directory, _NAME), server)


def read_own_keys(directory: Path, endpoint: str) -> NodeKeys:
    """This user's keys for the server at an endpoint, for workers of other machines that join it."""
    found = find_keys(directory, endpoint)
    if found is None:
        raise SettingsError(
            f"workers on other machines need a client key for the server at {endpoint}, and there is no "
            f"{directory / CLIENT_FILE}; make one where the server runs with `python -m gt.keys client NAME`, and copy "
            f"it there"
        )
    return NodeKeys(ClientKey(_NAME, found.server, found.public, found.secret))


def write_node_keys(directory: Path, text: str) -> None:
    """Write the keys that a process finds by GT_KEYS."""
    keys = msgspec.json.decode(text, type=NodeKeys)
    if keys.client is not None:
        write_private(directory / CLIENT_FILE, keys.client)
    if keys.server is not None:
        write_private(directory / SERVER_FILE, keys.server)
        if keys.client is not None:
            authorize(directory, _NAME, keys.client.public)
