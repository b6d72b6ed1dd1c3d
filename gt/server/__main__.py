"""`python -m gt.server -p 12345`: a dispatcher that clients and workers of this machine join."""

from __future__ import annotations

import argparse
import signal
import sys

import zmq

from gt.core.errors import GTError, SettingsError
from gt.core.settings import read_settings, require_loopback
from gt.dispatcher.captures import DispatcherCaptures
from gt.dispatcher.server import Server
from gt.monitor.instruction_log import open_log
from gt.monitor.monitor_socket import MonitorSocket
from gt.web_dashboard.start import start_dashboard
from gt.wire import shared_memory
from gt.wire.server_keys import keys_directory, make_keys, remove_keys, write_keys
from gt.wire.stderr_logging import configure_logging


def main() -> int:
    try:
        settings = read_settings()
    except SettingsError as error:
        print(f"gt.server: {error}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m gt.server", description="Run a GT dispatcher.")
    parser.add_argument("--host", default="localhost", help="the interface to listen on; loopback only")
    parser.add_argument(
        "-p", "--port", type=int, default=12345, help="the port to listen on (default: 12345; 0: any free port)"
    )
    parser.add_argument(
        "--dashboard", type=int, metavar="PORT", help="serve a web page about this server at a port (0: any free one)"
    )
    options = parser.parse_args()
    configure_logging(settings)
    try:
        endpoint = f"tcp://{require_loopback(options.host)}:{options.port}"
        secret, keys = make_keys()
        server = Server(
            endpoint,
            open_log(settings.log),
            silence=settings.heartbeat_timeout,
            keys=secret,
            copy_limit=settings.copy_limit,
        )
        endpoint = server.endpoint
        dashboard = None
        try:
            directory = keys_directory(settings.keys)
            if options.dashboard is not None:
                dashboard = start_dashboard(server.view, options.dashboard, settings.dashboard_token)
            write_keys(directory, endpoint, keys)
        except GTError:
            if dashboard is not None:
                dashboard.close()
            server.close()
            raise
    except zmq.ZMQError as error:
        print(f"gt.server: cannot listen at {endpoint}: {error}; is another server running there?", file=sys.stderr)
        return 1
    except GTError as error:
        print(f"gt.server: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    shared_memory.sweep_dead()
    port = endpoint.rpartition(":")[2]
    print(f"GT server at {endpoint}; workers join with: python -m gt.worker -p {port}", file=sys.stderr)
    monitor = MonitorSocket(DispatcherCaptures(server.with_dispatcher), server.read_status, int(port))
    if dashboard is not None:
        print(f"dashboard at {dashboard.url}", file=sys.stderr)
    try:
        server.run()
    finally:
        if dashboard is not None:
            dashboard.close()
        monitor.close()
        remove_keys(directory, endpoint, keys)
    return 0


if __name__ == "__main__":
    sys.exit(main())
