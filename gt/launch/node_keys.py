"""The keys of a server or a worker that a launcher starts, as text that the launcher passes to another machine.

A server that a launcher starts has its own keys, made for it and removed with it. What passes the launcher's
transport, which may not be encrypted, is typed JSON text; each machine writes it to a private directory.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gt.core.errors import SettingsError
from gt.wire.private_files import write_private
from gt.wire.server_keys import (
    AUTHORIZED,
    CLIENT_FILE,
    SERVER_FILE,
    AuthorizedKey,
    ClientKey,
    ServerKey,
    find_keys,
    new_client_key,
    new_server_key,
)

_NAME = "launched"


class NodeKeys(msgspec.Struct, frozen=True):
    """The keys of one process: a worker has a client key, a server both. Without encryption there are none."""

    client: ClientKey | None = None
    server: ServerKey | None = None

    def for_workers(self) -> NodeKeys:
        return NodeKeys(self.client)

    def records(self) -> dict[str, msgspec.Struct]:
        """The key in each file of a directory of keys. A server admits the client key beside its own."""
        found: dict[str, msgspec.Struct | None] = {CLIENT_FILE: self.client, SERVER_FILE: self.server}
        if self.client is not None and self.server is not None:
            found |= {f"{AUTHORIZED}/{self.client.name}": AuthorizedKey(self.client.public)}
        return {name: key for name, key in found.items() if key is not None}

    def write(self, directory: Path) -> None:
        """Write the keys that a process finds by GT_KEYS."""
        for name, key in self.records().items():
            write_private(directory / name, key)


def make_node_keys(name: str = _NAME) -> NodeKeys:
    """New keys for a server, its workers and its clients. They are in no file."""
    server = new_server_key()
    return NodeKeys(new_client_key(name, server), server)


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
