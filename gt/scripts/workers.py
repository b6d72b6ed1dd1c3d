"""`python -m gt.scripts.workers`: the workers of a server, which may be on another machine."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from gt.core.errors import ProtocolError, ServerLost
from gt.core.ids import SESSION_SHIFT
from gt.core.messages import Goodbye, ReadWorkers, Refused, Rejected, WorkersRead
from gt.core.settings import Settings, parse_address, read_settings
from gt.core.tables import WorkerList
from gt.scripts.command_line import run_tool
from gt.wire.server_keys import keys_directory
from gt.wire.socket_channel import SocketChannel

_SECONDS = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gt.scripts.workers", description="List the workers of a server.")
    parser.add_argument("--server", default="", help="host:port (default: GT_SERVER, or localhost:12345)")
    parser.add_argument("--json", action="store_true", help="a JSON object for each worker, one on each line")
    options = parser.parse_args()
    return run_tool("gt.scripts.workers", lambda: _list(options.server, is_json=options.json))


def _list(server: str, *, is_json: bool) -> int:
    settings = read_settings()
    found = read_workers(server or settings.server or "localhost:12345", settings)
    if is_json:
        for worker in found:
            print(msgspec.json.encode(msgspec.structs.asdict(worker)).decode())
    else:
        print(found)
    return 0


def read_workers(server: str, settings: Settings) -> WorkerList:
    """The workers of the server at an address."""
    host, port = parse_address(server)
    keys = None if settings.insecure else keys_directory(settings.keys)
    channel = SocketChannel(f"tcp://{host}:{port}", None, keys, settings.heartbeat_timeout)
    try:
        welcome = channel.greet(0, min(settings.timeout, _SECONDS))
        channel.send([ReadWorkers((welcome.ident << SESSION_SHIFT) + 1)], [])
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            for received in channel.receive():
                if isinstance(received.answer, WorkersRead):
                    channel.send([Goodbye()], [])
                    return WorkerList(received.answer.workers)
                if isinstance(received.answer, Refused | Rejected):
                    raise ProtocolError(received.answer.reason)
            channel.wait()
    finally:
        channel.close()
    raise ServerLost(f"the server at {server} has not listed its workers within {_SECONDS:g} s")


if __name__ == "__main__":
    sys.exit(main())
