"""`python -m gt.keys`: makes the keys of a server that other machines reach, and of those who may join it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gt.core.errors import GTError, SettingsError
from gt.core.settings import read_settings
from gt.wire.server_keys import (
    CLIENT_FILE,
    SERVER_FILE,
    authorize,
    keys_directory,
    make_client_key,
    make_server_key,
    read_authorized,
    read_client_key,
    read_server_key,
    revoke,
    write_client_key,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        directory = keys_directory(read_settings().keys)
        _COMMANDS[options.command](directory, options)
    except GTError as error:
        print(f"gt.keys: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gt.keys", description="Keys for servers that other machines reach. They are kept in GT_KEYS."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("server", help="make the server's key, once, on its machine")
    server.add_argument("--replace", action="store_true", help="make another key: no client key is of use then")
    client = commands.add_parser("client", help="make a client key that the server admits, to copy to other machines")
    client.add_argument("name", help="whom the key is for: a person, a team or a machine")
    client.add_argument("--out", type=Path, metavar="FILE", help="where to write the key (default: NAME.key)")
    authorizing = commands.add_parser("authorize", help="admit a public key that was made elsewhere")
    authorizing.add_argument("name")
    authorizing.add_argument("public", help="the public key: 40 characters")
    commands.add_parser("revoke", help="refuse a client key from now on").add_argument("name")
    listing = commands.add_parser("list", help="the client keys that the server admits")
    listing.add_argument("--json", action="store_true")
    commands.add_parser("show", help="the public keys of this machine")
    return parser.parse_args(arguments)


def _server(directory: Path, options: argparse.Namespace) -> None:
    key = make_server_key(directory, replaces=options.replace)
    print(key.public)
    print(
        f"the server's key is in {directory / SERVER_FILE}; make a key for those who may join with: "
        f"python -m gt.keys client NAME",
        file=sys.stderr,
    )


def _client(directory: Path, options: argparse.Namespace) -> None:
    path = options.out or Path(f"{options.name}.key")
    key = make_client_key(directory, options.name)
    try:
        write_client_key(path, key)
    except GTError:
        revoke(directory, options.name)
        raise
    print(path)
    print(
        f"copy {path} to the machines of clients and workers, as .gt/keys/{CLIENT_FILE} with mode 600; whoever has it "
        f"may join",
        file=sys.stderr,
    )


def _authorize(directory: Path, options: argparse.Namespace) -> None:
    authorize(directory, options.name, options.public)


def _revoke(directory: Path, options: argparse.Namespace) -> None:
    revoke(directory, options.name)


def _list(directory: Path, options: argparse.Namespace) -> None:
    found = {name: public for public, name in read_authorized(directory).items()}
    if options.json:
        print(json.dumps(found))
        return
    for name, public in sorted(found.items()):
        print(f"{name:20} {public}")


def _show(directory: Path, options: argparse.Namespace) -> None:
    server, client = read_server_key(directory), read_client_key(directory)
    if server is None and client is None:
        raise SettingsError(f"there is neither {SERVER_FILE} nor {CLIENT_FILE} in {directory}")
    if server is not None:
        print(f"{'server':20} {server.public}")
    if client is not None:
        print(f"{'client ' + client.name:20} {client.public}")


_COMMANDS = {
    "server": _server,
    "client": _client,
    "authorize": _authorize,
    "revoke": _revoke,
    "list": _list,
    "show": _show,
}


if __name__ == "__main__":
    sys.exit(main())
