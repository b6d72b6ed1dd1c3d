"""Where a server listens, who may join it there, and what it tells people about that."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

import zmq

from gt.core.errors import SettingsError
from gt.wire.addresses import ANY, is_loopback, public_addresses, resolve
from gt.wire.private_files import is_read_only
from gt.wire.process_identity import host_name
from gt.wire.server_keys import (
    SERVER_FILE,
    MemberKeys,
    ServerKeys,
    keys_directory,
    make_keys,
    read_authorized,
    read_server_key,
)


class Listening(NamedTuple):
    """An address to listen at, by the `name` that others use for it, with the server's keys and those of members of
    this machine (None: without encryption). `directory` has the keys."""

    address: str
    port: int
    name: str
    keys: ServerKeys | None
    members: MemberKeys | None
    directory: Path

    @property
    def endpoint(self) -> str:
        return self.endpoint_at(self.port)

    @property
    def is_fixed(self) -> bool:
        """Whether the keys are in a directory in which nothing can be written: members of this machine use a client key
        then. A server at loopback has no others."""
        return not is_loopback(self.address) and is_read_only(self.directory)

    def endpoint_at(self, port: int) -> str:
        return f"tcp://{self.address}:{port}"

    def explain_failure(self, error: zmq.ZMQError) -> str:
        """What is said when the system does not let the server listen."""
        remedy = _REMEDIES.get(error.errno or 0, "choose another --host or -p")
        return f"cannot listen at {self.endpoint}: {os.strerror(error.errno or 0)}; {remedy}"

    def worker_command(self, port: int) -> str:
        host = "" if is_loopback(self.address) else f" --host {self.name}"
        return f"python -m gt.worker{host} -p {port}{'' if self.keys is not None else ' --insecure'}"

    def describe(self, port: int) -> str:
        """What is said when the server listens: its address, and what to run next."""
        text = f"GT server at {self.endpoint_at(port)}; workers join with: {self.worker_command(port)}"
        warning = [] if self.keys is not None else [_WARNING]
        if is_loopback(self.address):
            return "\n".join([*warning, text])
        lines = [*warning, text, f'programs join with: gt.connect("{self.name}:{port}")']
        if self.keys is not None:
            names = sorted(read_authorized(self.directory).values())
            lines.append(
                f"it admits the client keys {', '.join(names)}"
                if names
                else "no client key is admitted yet; make one with: python -m gt.keys client NAME"
            )
        return "\n".join(lines)


def choose_listening(host: str, port: int, insecure: int, keys: str) -> Listening:
    """The place of a server at a host of this machine. `insecure` is how often the user asked to do without encryption,
    `keys` the setting of the directory of keys. Raises SettingsError where other machines would reach a server without
    keys."""
    address = resolve(host)
    directory = keys_directory(keys)
    name = host_name() if address == ANY else "localhost" if is_loopback(address) else host
    if insecure:
        _require_private_network(address, insecure)
        return Listening(address, port, name, None, None, directory)
    key = read_server_key(directory)
    if key is None and is_loopback(address):
        return Listening(address, port, name, *make_keys(), directory)
    if key is None:
        raise SettingsError(
            f"a server that other machines reach needs a key, and there is no {directory / SERVER_FILE}; make it with: "
            f"python -m gt.keys server"
        )
    read_authorized(directory)  # raises if others could have written there
    return Listening(address, port, name, *make_keys(key, directory), directory)


_REMEDIES = {
    errno.EADDRINUSE: "is another server running there? Choose another port with -p; 0 is any free one",
    errno.EADDRNOTAVAIL: "--host is an address of this machine, or 0.0.0.0 for all of them",
    errno.EACCES: "ports under 1024 need rights; choose another port with -p",
}
_WARNING = (
    "gt.server: WARNING: --insecure: anybody who reaches this port may use the workers, read all tensors and end "
    "sessions; nothing is encrypted"
)


def _require_private_network(address: str, insecure: int) -> None:
    public = public_addresses(address)
    if public and insecure < 2:
        raise SettingsError(
            f"--insecure is refused at {', '.join(public)}, which the whole internet may reach; use keys "
            f"(python -m gt.keys server) or an address of a private network, or repeat --insecure if you mean it"
        )
