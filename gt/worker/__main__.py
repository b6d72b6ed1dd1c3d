"""`python -m gt.worker --host server-name -p 12345`: a worker that joins a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gt.core.command_options import count, option, server_port
from gt.core.errors import GTError, ServerLost, SettingsError
from gt.core.settings import BACKENDS, Settings, check_host, parse_bytes, read_settings
from gt.wire.addresses import NotResolved, interface_address, is_loopback, resolve
from gt.wire.lifeline import clear_up, end_with_parent
from gt.wire.stderr_logging import configure_logging
from gt.worker.process import WorkerProcess
from gt.worker.task_ranks import JoinTurn, Ranks, choose_device, choose_threads, read_ranks, read_tasks, share_cpus
from gt.worker.termination import end_on_sigterm


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        settings = read_settings()
    except SettingsError as error:
        print(f"gt.worker: {error}", file=sys.stderr)
        return 2
    options = _parse(arguments, settings)
    settings = msgspec.structs.replace(settings, insecure=settings.insecure or options.insecure > 0)
    configure_logging(settings)
    if options.lifeline is not None:
        end_with_parent(lambda: clear_up(options.lifeline))
    try:
        worker = _make_worker(options, settings)
        end_on_sigterm(worker.leave, worker.stop, settings.drain)
        worker.run()
    except KeyboardInterrupt:
        return 130
    except GTError as error:
        print(f"gt.worker: {error}", file=sys.stderr)
        if isinstance(error, ServerLost) and options.lifeline is not None:
            clear_up(options.lifeline)  # this process may notice the end of the server before that of the lifeline
        return 1
    return 0


def _parse(arguments: Sequence[str] | None, settings: Settings) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gt.worker", description="Join a GT server as a worker.")
    parser.add_argument("--host", default="localhost", help="where the server is (default: localhost)")
    parser.add_argument("-p", "--port", type=server_port, default=12345, help="the server's port (default: 12345)")
    parser.add_argument("--backend", choices=BACKENDS, default=settings.backend)
    parser.add_argument("--device", default="", help="cpu, cuda:0, ... (default: a GPU if there is one)")
    parser.add_argument(
        "--threads", type=count, default=0, help="CPU threads to compute with (default: torch's choice)"
    )
    parser.add_argument(
        "--memory",
        type=option(parse_bytes),
        default=0,
        help="the most bytes of tensors that the worker holds, such as 8GiB (default: as many as there is memory for)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object when the worker has joined")
    parser.add_argument(
        "--insecure", action="count", default=0, help="join a server that was started with --insecure, without keys"
    )
    parser.add_argument("--connect", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lifeline", type=Path, metavar="DIRECTORY", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _make_worker(options: argparse.Namespace, settings: Settings) -> WorkerProcess:
    """A worker as the command line says and, if torchrun or srun has started it, as their numbers say."""
    device, threads, memory = options.device, options.threads, options.memory
    compiling = options.lifeline / "compile" if options.lifeline is not None else None
    if options.connect:  # one of a program of this machine
        return WorkerProcess(options.connect, options.backend, device, threads, settings, compiling, memory=memory)
    endpoint = _find_endpoint(options, settings)
    announce = _announce(endpoint, is_json=options.json)
    ranks = read_ranks()
    share = share_cpus if ranks is None else choose_threads
    if (numbers := ranks or read_tasks()) is not None:
        device, threads = device or choose_device(numbers, options.backend), threads or share(numbers)
    turn = JoinTurn(ranks or Ranks(0, 0, 1, 1))

    def note_joined(worker: int, device: str) -> None:
        announce(worker, device)
        turn.pass_on()

    return WorkerProcess(
        endpoint, options.backend, device, threads, settings, compiling, note_joined, turn.wait, memory
    )


def _find_endpoint(options: argparse.Namespace, settings: Settings) -> str:
    """The server's address. Raises SettingsError if there is no such host, or interface of this machine."""
    host = check_host(options.host)
    if settings.interface:
        interface_address(settings.interface)
    try:
        is_near = is_loopback(resolve(host))
    except NotResolved:
        is_near = False
    if settings.insecure and not is_near:
        print(
            "gt.worker: WARNING: --insecure: what this worker exchanges with its server is neither encrypted nor "
            "authenticated",
            file=sys.stderr,
        )
    return f"tcp://{host}:{options.port}"


def _announce(endpoint: str, *, is_json: bool) -> Callable[[int, str], None]:
    """Tell people, and machines if they ask, when the worker has joined."""
    server = endpoint.removeprefix("tcp://")

    def note_joined(worker: int, device: str) -> None:
        print(f"GT worker {worker} ({device}) has joined the server at {server}", file=sys.stderr, flush=True)
        if is_json:
            print(msgspec.json.encode({"worker": worker, "device": device, "server": server}).decode(), flush=True)

    return note_joined


if __name__ == "__main__":
    sys.exit(main())
