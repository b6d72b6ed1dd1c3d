"""`python -m gt.worker --host localhost -p 12345`: a worker that joins a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gt.core.errors import GTError, ServerLost, SettingsError
from gt.core.settings import BACKENDS, read_settings, require_loopback
from gt.wire.lifeline import clear_up, end_with_parent
from gt.wire.stderr_logging import configure_logging
from gt.worker.process import WorkerProcess
from gt.worker.termination import end_on_sigterm


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        settings = read_settings()
    except SettingsError as error:
        print(f"gt.worker: {error}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m gt.worker", description="Join a GT server as a worker.")
    parser.add_argument("--host", default="localhost", help="where the server is (default: localhost)")
    parser.add_argument("-p", "--port", type=int, default=12345, help="the server's port (default: 12345)")
    parser.add_argument("--backend", choices=BACKENDS, default=settings.backend)
    parser.add_argument("--device", default="", help="cpu, cuda:0, ... (default: a GPU if there is one)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads to compute with (default: torch's choice)")
    parser.add_argument("--connect", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lifeline", type=Path, metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    configure_logging(settings)
    if options.lifeline is not None:
        end_with_parent(lambda: clear_up(options.lifeline))
    compiling = options.lifeline / "compile" if options.lifeline is not None else None
    try:
        endpoint = options.connect or f"tcp://{require_loopback(options.host)}:{options.port}"
        worker = WorkerProcess(endpoint, options.backend, options.device, options.threads, settings, compiling)
        end_on_sigterm(worker.stop)
        worker.run()
    except KeyboardInterrupt:
        return 130
    except GTError as error:
        print(f"gt.worker: {error}", file=sys.stderr)
        if isinstance(error, ServerLost) and options.lifeline is not None:
            clear_up(options.lifeline)  # this process may notice the end of the server before that of the lifeline
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
