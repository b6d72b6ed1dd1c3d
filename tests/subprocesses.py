"""Servers, workers and clients as a person would start them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A program that Ctrl-C interrupts, even where the tests themselves run in the background."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s\n{out}\n{err}") from None
    return process.returncode, out, err


@contextmanager
def running(*processes: subprocess.Popen[str]) -> Iterator[None]:
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
from gt.wire.keys import keys_directory
channel = SocketChannel("tcp://127.0.0.1:{port}", None, keys_directory(read_settings().keys), 0)
channel.greet({workers}, 60)
channel.close()
"""


def wait_for_workers(port: int | str, count: int) -> None:
    """Until so many have joined the server."""
    code, _, err = finish(start("-c", _PROBE.format(port=port, workers=count)), 90)
    assert code == 0, err


def wait_until(condition, timeout: float = 30, what: str = "the condition") -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout} s"
        time.sleep(0.02)
