"""`python -m gt.server -p 12345`: a dispatcher that clients and workers join."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec
import zmq

from gt.core.command_options import listening_port, option
from gt.core.errors import GTError, SettingsError
from gt.core.output_files import open_text
from gt.core.settings import Settings, check_host, parse_lease, parse_limits, read_settings
from gt.dispatcher.captures import DispatcherCaptures
from gt.dispatcher.handshakes import Greeting
from gt.dispatcher.server import Server
from gt.monitor.log_rows import open_log
from gt.monitor.monitor_socket import MonitorSocket
from gt.server.health import HealthEndpoint
from gt.server.listening import Listening, choose_listening
from gt.signals.parser import MAX_BYTES, read_config
from gt.web_dashboard.start import start_dashboard
from gt.wire import shared_memory
from gt.wire.addresses import NotResolved
from gt.wire.lifeline import clear_up, end_with_parent
from gt.wire.server_keys import remove_keys, write_keys
from gt.wire.stderr_logging import configure_logging

MAX_LOG = 1 << 26  # bytes of a log file
MAX_SIGNALS = 1 << 18  # characters of a configuration that clients are given
_STOPPING_SECONDS = 3.0  # time for the messages to workers that their server ends


def main() -> int:
    try:
        settings = read_settings()
    except SettingsError as error:
        print(f"gt.server: {error}", file=sys.stderr)
        return 2
    options = _parse()
    if options.limits is not None:
        settings = msgspec.structs.replace(settings, limits=options.limits)
    configure_logging(settings)
    try:
        with contextlib.ExitStack() as stack:
            if options.log is not None:
                stack.enter_context(_logged_to(options.log))
            listening = choose_listening(check_host(options.host), options.port, options.insecure, settings.keys)
            return _serve(options, settings, listening)
    except (GTError, NotResolved) as error:
        print(f"gt.server: {error}", file=sys.stderr)
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gt.server", description="Run a GT dispatcher.")
    parser.add_argument(
        "--host", default="localhost", help="the interface to listen on; 0.0.0.0: all of them (default: localhost)"
    )
    parser.add_argument(
        "-p",
        "--port",
        type=listening_port,
        default=12345,
        help="the port to listen on (default: 12345; 0: any free port)",
    )
    parser.add_argument(
        "--dashboard",
        type=listening_port,
        metavar="PORT",
        help="serve a web page about this server at a port (0: any free one)",
    )
    parser.add_argument(
        "--health-port", type=listening_port, metavar="PORT", help="answer `ok` at /health of a port (0: any free one)"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="signals for programs that do not configure these themselves"
    )
    parser.add_argument(
        "--limits",
        type=option(parse_limits),
        metavar="LIMITS",
        help="of each session, for example bytes=4GiB,tensors=10000,instructions=5000",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="append who joins and leaves, and warnings, to a file")
    parser.add_argument(
        "--lease",
        type=option(parse_lease),
        metavar="SECONDS",
        help="how long the session of a program is kept whose connection is lost (default: GT_LEASE, or 300)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object with the address when it listens")
    parser.add_argument(
        "--insecure", action="count", default=0, help="without keys and encryption; twice: even at a public address"
    )
    parser.add_argument("--lifeline", type=Path, metavar="DIRECTORY", help=argparse.SUPPRESS)
    return parser.parse_args()


def _serve(options: argparse.Namespace, settings: Settings, listening: Listening) -> int:
    stopped = threading.Event()
    with contextlib.ExitStack() as stack:
        try:
            server = Server(
                listening.endpoint,
                open_log(settings.log),
                silence=settings.heartbeat_timeout,
                lease=settings.lease if options.lease is None else options.lease,
                keys=listening.keys,
                copy_limit=settings.copy_limit,
                greeting=_read_signals(options.config),
                limits=settings.limits,
            )
        except zmq.ZMQError as error:
            raise SettingsError(listening.explain_failure(error)) from None
        stack.callback(server.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: _end(server))
        dashboard = None
        if options.dashboard is not None:
            dashboard = start_dashboard(server.view, options.dashboard, settings.dashboard_token)
            stack.callback(dashboard.close)
        endpoint = server.endpoint
        if options.health_port is not None:
            health = HealthEndpoint(listening.address, options.health_port, lambda: server.turned_at)
            stack.callback(health.close)
            print(f"health at http://{listening.address}:{health.port}/health", file=sys.stderr)
        if listening.members is not None and not listening.is_fixed:
            write_keys(listening.directory, endpoint, listening.members)
            stack.callback(remove_keys, listening.directory, endpoint, listening.members)
        if options.lifeline is not None:
            end_with_parent(lambda: _end_with_program(server, stopped, options.lifeline))
            stack.callback(clear_up, options.lifeline)
        shared_memory.sweep_dead()
        port = int(endpoint.rpartition(":")[2])
        server.set_worker_command(listening.worker_command(port))
        _announce(listening, port, is_json=options.json)
        monitor = MonitorSocket(DispatcherCaptures(server.with_dispatcher), server.read_status, port)
        stack.callback(monitor.close)
        if dashboard is not None:
            print(f"dashboard at {dashboard.url}", file=sys.stderr)
        server.run()
    stopped.set()
    return 0


def _end(server: Server) -> None:
    """The first signal lets clients get the answers that they wait for; the second one does not."""
    if server.is_draining:
        server.stop()
    else:
        server.drain()


def _end_with_program(server: Server, stopped: threading.Event, directory: Path) -> None:
    """The program that has started this server has ended: tell workers to end, and remove the keys and the log. Both
    are done by the main thread, unless it is blocked."""
    server.drain()
    stopped.wait(_STOPPING_SECONDS)
    clear_up(directory)


def _announce(listening: Listening, port: int, *, is_json: bool) -> None:
    print(listening.describe(port), file=sys.stderr, flush=True)
    if is_json:
        found = {
            "endpoint": listening.endpoint_at(port),
            "host": listening.name,
            "port": port,
            "pid": os.getpid(),
            "encrypted": listening.keys is not None,
            "worker": listening.worker_command(port),
            "program": f'gt.connect("{listening.name}:{port}")',
        }
        print(msgspec.json.encode(found).decode(), flush=True)


def _read_signals(path: Path | None) -> Greeting:
    """The configuration of `--config`. Raises SignalError if it is wrong, now and not in each program."""
    if path is None:
        return Greeting()
    read_config(path)
    text = path.read_bytes()[:MAX_BYTES].decode("utf-8-sig")
    if len(text) > MAX_SIGNALS:
        raise SettingsError(f"{path} has {len(text)} characters; programs can be given {MAX_SIGNALS}")
    return Greeting(signals=text, signals_file=str(path))


class _OwnFileHandler(RotatingFileHandler):
    """Writes to no file that another user has put in place of the log."""

    def _open(self) -> TextIOWrapper:
        return open_text(self.baseFilename, "a")


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Append what the server logs to a file, from level INFO on. A file of MAX_LOG bytes is renamed, in place of the
    one before: clients that come and go decide how much is logged."""
    try:
        _require_reader(path)
        handler = _OwnFileHandler(path, maxBytes=MAX_LOG, backupCount=1)
    except OSError as error:
        raise SettingsError(f"--log {path} cannot be written: {error}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("gt")
    logger = logging.getLogger("gt.dispatcher")
    root.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    for shown in logger.handlers:
        shown.setLevel(max(shown.level, logging.WARNING))  # what stderr shows does not change
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def _require_reader(path: Path) -> None:
    """Raises OSError for a pipe that nobody reads: to open it would wait for a reader, without end."""
    if path.is_fifo():
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


if __name__ == "__main__":
    sys.exit(main())
