"""The process that programs of tests are forked from: torch, which takes longer to import than most of them run, is
imported once for all of them.

It forks for one client, the process of the tests, which gives it a socket. A request is a `Request` with two
descriptors for the program's output and one for its exit code; the answer is the program's pid.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import selectors
import socket
import sys
import tempfile
import types
from typing import NamedTuple

import numpy as np
import torch  # noqa: F401

_MAX_REQUEST = 1 << 20


class Request(NamedTuple):
    """A program as arguments of the interpreter, `-c code ...` or `-m module ...`, and its environment."""

    arguments: list[str]
    environment: dict[str, str]


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
