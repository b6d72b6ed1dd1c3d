"""Finds the programs of this user that can be looked at, and attaches to one of them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Iterator
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
from gt.wire.addresses import NotResolved, is_own_address, resolve
from gt.wire.private_files import is_private, monitor_directory, remove_socket

CONNECT_SECONDS = 5.0
_SOCKET_NAME = re.compile(r"([0-9]+)-([0-9]+)-[0-9a-f]+\.sock")


class RunningProgram(NamedTuple):
    """A program, or a server, that has a monitor socket. `port` is that of a server, 0 for a program."""

    pid: int
    port: int
    command: str
    path: Path


def running_programs() -> list[RunningProgram]:
    """The programs of this user that use GT now, the oldest first. The sockets of programs that have ended are
    removed. Raises SessionError if somebody else has made the directory of the sockets."""
    try:
        directory = monitor_directory()
        if not directory.exists():
            return []
        if not is_private(directory):
            raise SessionError(
                f"{directory} is not a private directory of this user, so that programs have no monitor socket; find "
                "out who made it and remove it, or set another TMPDIR for the program and for this tool"
            )
    except OSError as error:
        raise SessionError(f"the monitor sockets of programs cannot be found: {error}") from None
    return list(_answering(sorted(directory.glob("*.sock"), key=_age)))


def _answering(paths: Iterable[Path]) -> Iterator[RunningProgram]:
    """The programs of the monitor sockets at which somebody listens."""
    for path in paths:
        if (name := _SOCKET_NAME.fullmatch(path.name)) is None:
            continue
        try:
            _connect(path).close()
        except ConnectionRefusedError:
            remove_socket(path.name)
            continue
        except OSError:
            continue
        pid, port = map(int, name.groups())
        yield RunningProgram(pid, port, _command(pid), path)


def find_program(pid: int | None = None, server: str = "") -> RunningProgram:
    """The program with this pid, the server at this address of this machine, or the only program that runs. Raises
    SessionError if that is not one program."""
    port = _port_here(server) if server else 0
    programs = [each for each in running_programs() if pid in (None, each.pid) and port in (0, each.port)]
    if len(programs) == 1:
        return programs[0]
    if not programs:
        raise SessionError(_describe_absence(pid, server))
    listed = "\n".join(f"  {program.pid}  {program.command}" for program in programs)
    raise SessionError(f"several programs use GT; choose one with --pid:\n{listed}")


def _port_here(server: str) -> int:
    """The port of a server of this machine. Raises SessionError for one on another machine."""
    host, port = parse_address(server)
    try:
        is_here = is_own_address(resolve(host))
    except NotResolved as error:
        raise SessionError(str(error)) from None
    if not is_here:
        raise SessionError(f"the server at {server} is on another machine: run this command there")
    return port


def _describe_absence(pid: int | None, server: str) -> str:
    place = f"a program with another TMPDIR has its socket elsewhere than in {monitor_directory()}"
    if server:
        return f"no server of yours runs at {server} on this machine; {place}"
    if pid is None:
        return f"no program of yours uses GT now; start one, and attach while it runs; {place}"
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return f"there is no process {pid} on this machine"
    if owner != os.getuid():
        return f"process {pid} belongs to user {owner}, who alone can look at it"
    return (
        f"process {pid} does not use GT, or not yet; a program that has joined a server is seen there (--server), and "
        f"{place}"
    )


class Attachment:
    """A connection to a program, for one request."""

    def __init__(self, program: RunningProgram, connection: socket.socket) -> None:
        self._program = program
        self._connection = connection

    def ask(self, request: Request, patience: float) -> Iterator[MonitorAnswer]:
        """Send a request; gives its answers. Raises SessionError if the program refuses it, ends, or says nothing for
        `patience` seconds."""
        try:
            send_record(self._connection, request)
            self._connection.settimeout(patience)
            for answer in receive_answers(self._connection):
                if isinstance(answer, Refusal):
                    raise SessionError(f"process {self._program.pid} refuses: {answer.reason}")
                yield answer
        except TimeoutError:
            raise SessionError(_describe_silence(self._program.pid, patience)) from None
        except ConnectionError:
            raise SessionError(f"process {self._program.pid} has ended, or is ending") from None

    def end_capture(self) -> None:
        """Let a capture end now: the program sends what it has."""
        with contextlib.suppress(OSError):
            self._connection.sendall(b"\0")


@contextlib.contextmanager
def attached(program: RunningProgram) -> Iterator[Attachment]:
    """Raises SessionError if the program cannot be looked at."""
    try:
        connection = _connect(program.path)
    except OSError as error:
        raise SessionError(f"process {program.pid} cannot be looked at: {error}") from None
    with connection:
        yield Attachment(program, connection)


def ask(program: RunningProgram, request: Request, patience: float = CONNECT_SECONDS) -> Iterator[MonitorAnswer]:
    """The answers of a program to a request; see `Attachment.ask`."""
    with attached(program) as attachment:
        yield from attachment.ask(request, patience)


def _describe_silence(pid: int, seconds: float) -> str:
    text = f"process {pid} has said nothing for {seconds:g} s"
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "Tt":  # stopped by a signal or a debugger
            return f"{text}: it is stopped; let it go on with kill -CONT {pid}"
    return f"{text}; it is in code that lets no other thread run, or the machine is very busy"


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
