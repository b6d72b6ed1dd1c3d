"""The process that programs of tests are forked from: torch, which takes longer to import than most of them run, is
imported once for all of them.

It forks for one client, the process of the tests, which gives it a socket. A request is a `Request` with two
descriptors for the program's output and one for its exit code; the answer is the program's pid. A program on a test
host (`tests/hosts.py`) is a child of the process with that pid, which ends as the program does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import types
from typing import NamedTuple

import numpy as np
import torch  # noqa: F401

_MAX_REQUEST = 1 << 20
_NAMESPACES = ("user", "ipc", "uts", "net", "pid", "mnt")  # the user's first, which gives the right to enter the others


class Request(NamedTuple):
    """A program as arguments of the interpreter, `-c code ...` or `-m module ...`, its environment, and the first
    process of the test host that it runs on (0: no test host)."""

    arguments: list[str]
    environment: dict[str, str]
    host: int = 0


def receive_request(connection: socket.socket) -> tuple[Request, list[int]] | None:
    """A request and its descriptors; None if the client has ended."""
    data, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 3)
    return (Request(*json.loads(data)), descriptors) if data else None


def serve(connection: socket.socket) -> Request | None:
    """Fork programs until the client ends. Returns in a new process with its program, and in this one with None."""
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is connection:
                received = receive_request(connection)
                if received is None:
                    return None
                request, (out, err, status) = received
                pid = os.fork()
                if not pid:
                    selector.close()
                    connection.close()
                    _become_program(out, err)
                    if request.host:
                        _enter_host(request.host)
                    return request
                os.close(out)
                os.close(err)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
                connection.send(str(pid).encode())
            else:
                selector.unregister(key.fileobj)
                _report_end(key.fd, *key.data)


def _report_end(descriptor: int, pid: int, status: int) -> None:
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # the client has ended
        os.write(status, str(code).encode())
    os.close(status)


def _become_program(out: int, err: int) -> None:
    """In a new process: keep nothing of the server but its modules."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    np.random.seed()
    tempfile.tempdir = None


def _enter_host(pid: int) -> None:
    """Enter the namespaces of a test host. Returns in a new process, since a process keeps its pid; this one waits for
    it, and ends as it does."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptors = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    directory = os.getcwd()
    for descriptor in descriptors:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(descriptor)
    os.chdir(directory)
    child = os.fork()
    if not child:
        return
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def run(program: Request) -> None:
    """Run a program as the interpreter would."""
    os.environ.clear()
    os.environ.update(program.environment)
    option, what, *arguments = program.arguments
    sys.argv = [option, *arguments]
    if option == "-m":
        sys.argv[0] = what
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    gc.freeze()  # programs share the pages of all that was imported, as long as nobody writes to them
    _program = serve(socket.socket(fileno=int(sys.argv[1])))
    if _program is not None:
        run(_program)
