"""Starts servers, workers and client programs as processes, the way a user does, and waits for them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from gt.wire.server_keys import MemberKeys
from tests.forked_programs import CAN_FORK, ForkedProgram, ProgramServer

ROOT = Path(__file__).parents[1]
Program: TypeAlias = subprocess.Popen[str] | ForkedProgram


def server_keys() -> Path:
    """The directory of the keys of servers that tests start."""
    return Path(os.environ["GT_KEYS"])


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that no other program is given, and at which nobody listens until the test starts a server there."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets the server bind to it as well
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


def start(*arguments: str, **environment: str) -> Program:
    """A program, `-c code` or `-m module`, with torch imported already. A script is started by an interpreter, and so
    is a server, which does without torch and ends sooner without it."""
    if CAN_FORK and arguments[0] in ("-c", "-m") and arguments[1] != "gt.server":
        return program_server().start(arguments, _environment(environment))
    return start_interpreter(*arguments, **environment)


@functools.cache
def program_server() -> ProgramServer:
    return ProgramServer(ROOT)


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


def start_interpreter(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A new interpreter, for tests of imports and for programs without torch. SIGINT interrupts it, even where
    the tests themselves run in the background."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=_environment(environment),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def start_server(**environment: str) -> tuple[Program, int]:
    """A server, and the port that it was given by the system."""
    process = start("-m", "gt.server", "-p", "0", **environment)
    try:
        return process, find_port(process, server_keys())
    except BaseException:
        process.kill()
        process.communicate()
        raise


def find_port(process: Program, directory: Path) -> int:
    """The port of a server, read from the keys that it writes when it listens."""
    ports: list[int] = []

    def find() -> bool:
        assert process.poll() is None, process.communicate()[1]
        for path in directory.glob("[!.]*-*"):
            with contextlib.suppress(FileNotFoundError):  # another server has ended meanwhile
                if msgspec.json.decode(path.read_bytes(), type=MemberKeys).pid == process.pid:
                    ports.append(int(path.name.rpartition("-")[2]))
        return bool(ports)

    wait_until(find, what="the server's keys")
    return ports[0]


@contextmanager
def serving(workers: int = 0, **environment: str) -> Iterator[int]:
    """The port of a server whose workers have all joined."""
    main, port = start_server(**environment)
    started = [start("-m", "gt.worker", "-p", str(port), "--threads", "1", **environment) for _ in range(workers)]
    with running(main, *started):
        if workers:
            wait_for_workers(port, workers)
        yield port


def finish(process: Program, timeout: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s\n{out}\n{err}") from None
    return process.returncode, out, err


@contextmanager
def running(*processes: Program) -> Iterator[None]:
    """End the processes, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in processes:
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


_PROBE = """
from gt.core.settings import read_settings
from gt.wire.socket_channel import SocketChannel
from gt.wire.server_keys import keys_directory
channel = SocketChannel("tcp://127.0.0.1:{port}", None, keys_directory(read_settings().keys), 0)
channel.greet({workers}, 60)
channel.close()
"""


def wait_for_workers(port: int | str, count: int) -> None:
    """Wait until so many workers have joined a server."""
    code, _, err = finish(start_interpreter("-c", _PROBE.format(port=port, workers=count)), 90)
    assert code == 0, err


def wait_until(condition, timeout: float = 30, what: str = "the condition") -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout} s"
        time.sleep(0.02)
