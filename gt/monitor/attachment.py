"""Finds the programs of this user that can be looked at, and attaches to one of them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gt.core.errors import SessionError
from gt.core.settings import parse_address
from gt.monitor.monitor_protocol import (
    MonitorAnswer,
    Refusal,
    Request,
    receive_answers,
    require_same_user,
    send_record,
)
from gt.wire.monitor_directory import monitor_directory, remove_socket
from gt.wire.private_directories import is_private

CONNECT_SECONDS = 5.0


class RunningProgram(NamedTuple):
    """A program, or a server, that has a monitor socket. `port` is that of a server, 0 for a program."""

    pid: int
    port: int
    command: str
    path: Path


def running_programs() -> list[RunningProgram]:
    """The programs of this user that use GT now, the oldest first. The sockets of programs that have ended are
    removed."""
    directory = monitor_directory()
    if not directory.exists() or not is_private(directory):
        return []
    found = []
    for path in sorted(directory.glob("*.sock"), key=_age):
        try:
            _connect(path).close()
        except ConnectionRefusedError:
            remove_socket(path.name)
            continue
        except OSError:
            continue
        pid, port = map(int, path.name.split("-")[:2])
        found.append(RunningProgram(pid, port, _command(pid), path))
    return found


def find_program(pid: int | None = None, server: str = "") -> RunningProgram:
    """The program with this pid, the server at this address of this machine, or the only program that runs. Raises
    SessionError if that is not one program."""
    port = parse_address(server)[1] if server else 0
    programs = [each for each in running_programs() if pid in (None, each.pid) and port in (0, each.port)]
    if len(programs) == 1:
        return programs[0]
    if not programs:
        which = "no program of yours uses GT now" if pid is None else f"process {pid} does not use GT"
        which = f"no server of yours runs at {server} on this machine" if server else which
        raise SessionError(f"{which}; start one, and attach while it runs")
    listed = "\n".join(f"  {program.pid}  {program.command}" for program in programs)
    raise SessionError(f"several programs use GT; choose one with --pid:\n{listed}")


def ask(program: RunningProgram, request: Request) -> Iterator[MonitorAnswer]:
    """Send a request to a program; gives its answers. Raises SessionError if the program refuses it or ends."""
    try:
        with _connect(program.path) as connection:
            send_record(connection, request)
            connection.settimeout(None)
            for answer in receive_answers(connection):
                if isinstance(answer, Refusal):
                    raise SessionError(f"process {program.pid} refuses: {answer.reason}")
                yield answer
    except OSError as error:
        raise SessionError(f"process {program.pid} cannot be looked at: {error}") from None


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_SECONDS)
    try:
        connection.connect(str(path))
        require_same_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "?"
