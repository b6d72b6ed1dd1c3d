"""`python -m gt.server -p 12345`: a dispatcher that clients and workers of this machine join."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys

import zmq

from gt.core.errors import GTError
from gt.core.settings import configure_logging, read_settings, require_loopback
from gt.dispatcher.server import Server
from gt.monitor.instruction_log import open_log
from gt.wire.lifeline import end_with_parent

_PATIENCE_SECONDS = 2.0  # for workers, which end at the same time as we do


def main() -> int:
    settings = read_settings()
    parser = argparse.ArgumentParser(prog="python -m gt.server", description="Run a GT dispatcher.")
    parser.add_argument("--host", default="localhost", help="the interface to listen on; loopback only")
    parser.add_argument("-p", "--port", type=int, default=12345, help="the port to listen on (default: 12345)")
    parser.add_argument("--bind", default="", help=argparse.SUPPRESS)
    parser.add_argument("--directory", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lifeline", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    configure_logging(settings)
    try:
        endpoint = options.bind or f"tcp://{require_loopback(options.host)}:{options.port}"
        server = Server(endpoint, open_log(settings.instruction_log))
    except zmq.ZMQError as error:
        print(f"gt.server: cannot listen at {endpoint}: {error}; is another server running there?", file=sys.stderr)
        return 1
    except GTError as error:
        print(f"gt.server: {error}", file=sys.stderr)
        return 1
    if options.lifeline:
        end_with_parent(lambda: clear_up(server, options.directory))
    for number in (signal.SIGTERM, signal.SIGINT)[: 1 if options.lifeline else 2]:
        signal.signal(number, lambda *_: server.stop())
    if not options.bind:
        print(f"GT server at {endpoint}; workers join with: python -m gt.worker -p {options.port}", file=sys.stderr)
    server.run()
    return 0


def clear_up(server: Server, directory: str) -> None:
    """What is left when the client that all this was started for is gone: shared memory, sockets and logs."""
    server.sweep_peers(_PATIENCE_SECONDS)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
