"""`LaunchedProcess`: a server or a worker on this machine that ends together with the process that has started it.

That process is the program itself, an actor of Ray or a worker of Dask. It needs no torch. How processes end, and what
is told of their ends, is the same for all that launchers start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import msgspec

from gt.core.environment import import_environment
from gt.core.errors import SettingsError
from gt.launch.commands import Command, launch_environment
from gt.wire import shared_memory

READY_SECONDS = 300.0  # time for a worker to join, and for a server to listen
GRACE_SECONDS = 7.0  # a worker ends within 5 s of SIGTERM
_OUTPUT_LENGTH = 4000  # characters: the stacks of all threads of a process that crashed


class Announcement(msgspec.Struct, frozen=True):
    """What is read of the line that a server or a worker prints with `--json`: the server's port, or the worker's
    device."""

    port: int = 0
    device: str = ""


class ProcessStatus(msgspec.Struct, frozen=True):
    """A process as a launcher sees it from another machine. `output` is what a process that has ended said last."""

    pid: int
    announced: Announcement | None
    exit_code: int | None = None
    output: str = ""

    def describe(self) -> str:
        """How the process has ended."""
        return "is running" if self.exit_code is None else describe_end(self.exit_code, self.output)


def decode_status(text: str) -> ProcessStatus:
    """A status that another machine has sent as text."""
    return msgspec.json.decode(text, type=ProcessStatus)


class LaunchedProcess:
    """A process with a private directory for its keys and its output. `note_end` is called with it, in another thread,
    if the process ends otherwise than by `stop`. A process that is not ready within `limit` seconds, because no
    server answers, is ended."""

    def __init__(
        self,
        command: Command,
        note_end: Callable[[LaunchedProcess], None] = lambda process: None,
        limit: float = READY_SECONDS,
    ) -> None:
        self._limit = limit
        self._note_end = note_end
        self._announced: Announcement | None = None
        self._said = threading.Condition()
        self._is_stopping = False
        self.directory = make_directory()
        self._log = (self.directory / "output.log").open("w+b")  # kept open: a worker removes its directory at its end
        self.keys = self.directory / "keys"
        try:
            command.keys.write(self.keys)
            self._process = subprocess.Popen(
                [*command.arguments, "--lifeline", str(self.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**_own_environment(), **command.environment, "GT_KEYS": str(self.keys)},
                start_new_session=True,  # Ctrl-C interrupts the program only
            )
        except BaseException:
            self._remove_files()
            raise
        watched = {"gt-launched-process": self._watch, "gt-launched-limit": self._require_ready}
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in watched.items()]
        for thread in self._threads:
            thread.start()

    def _watch(self) -> None:
        """Read what the process announces, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._said:
                self._announced = msgspec.json.decode(line, type=Announcement)
                self._said.notify_all()
        self._process.wait()
        with self._said:
            self._said.notify_all()
        if not self._is_stopping:
            self._note_end(self)

    def _require_ready(self) -> None:
        if self.wait_for_announcement(self._limit).announced is None and self._process.poll() is None:
            with contextlib.suppress(OSError, ValueError):  # `stop` may close the log at the same time
                self._log.write(b"it was not ready within %g s, and was ended\n" % self._limit)
                self._log.flush()
            self._process.terminate()

    def read_status(self) -> ProcessStatus:
        code = self._process.poll()
        return ProcessStatus(self._process.pid, self._announced, code, self._output() if code is not None else "")

    def encode_status(self) -> str:
        """The status, for another machine."""
        return msgspec.json.encode(self.read_status()).decode()

    def wait_for_announcement(self, seconds: float) -> ProcessStatus:
        """The status as soon as the process has said that it is ready, has ended, or the time is over."""
        with self._said:
            self._said.wait_for(lambda: self._announced is not None or self._process.poll() is not None, seconds)
        return self.read_status()

    def _output(self) -> str:
        try:
            self._log.flush()
            return last_output(os.pread(self._log.fileno(), 1 << 20, 0))
        except (OSError, ValueError):
            return ""

    def stop(self) -> None:
        """End the process: by SIGTERM, and by SIGKILL if it does not end in time. Its files are removed."""
        self._is_stopping = True
        end_processes([self._process], GRACE_SECONDS)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(GRACE_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        shared_memory.sweep(self._process.pid)
        self._remove_files()

    def _remove_files(self) -> None:
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def end_processes(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Tell processes to end, all at once, and kill those that do not end in time."""
    for process in processes:
        process.terminate()
    have_ended(processes, seconds)
    for process in processes:
        process.kill()
        process.wait()


def have_ended(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Whether all processes end within some seconds."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    return all(process.returncode is not None for process in processes)


def describe_end(exit_code: int, output: str, when: str = "") -> str:
    """How a process has ended, and what it said last."""
    killed = exit_code < 0
    how = f"was killed by {signal.Signals(-exit_code).name}" if killed else f"ended with exit code {exit_code}"
    return f"{how}{when}; it said:\n{output}\n" if output else how + when


def last_output(data: bytes) -> str:
    """The end of what a process has said."""
    return data.decode(errors="replace").strip()[-_OUTPUT_LENGTH:]


def make_directory() -> Path:
    """A directory for the keys, sockets and logs of processes that only this user can enter."""
    with writing("a new directory"):
        return Path(tempfile.mkdtemp(prefix="gt-"))


@contextlib.contextmanager
def writing(what: Path | str) -> Generator[None]:
    """Raise SettingsError if temporary files cannot be written."""
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"{what} for the keys, sockets and logs of processes cannot be written: {error}; set TMPDIR to a directory "
            f"that exists, is writable and has room"
        ) from None


def _own_environment() -> dict[str, str]:
    """This process's `os.environ` without its program's GT_*, torchrun's and srun's variables; PYTHONPATH is
    `sys.path`."""
    left_out = ("GT_", "TORCHELASTIC_", "SLURM_STEP_")
    others = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**others, **launch_environment(), **import_environment()}
