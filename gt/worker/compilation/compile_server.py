"""The compile server: one process for the workers of a host, which compiles units one after another at low priority.

It forks a process for each unit, after torch's compiler was imported once: that process can be ended when it takes too
long, together with the C++ compiler that it runs. The limit is one of CPU time, since a process of low priority may
wait long for a CPU; in all it may take ten times as long. A process that gets next to no CPU is started again at
ordinary priority: no process may raise its own. The server ends, and removes its directory, when its last worker has
ended, of which the kernel tells it by closing the connection. If it is stopped then, the kernel continues
it: at the end of the worker that has started it, and of the fork server, whose child it becomes after that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import selectors
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import torch

from gt.core.errors import ConnectionLost
from gt.wire.lifeline import signal_at_parent_end
from gt.worker.compilation import private_directory
from gt.worker.compilation.compile_units import CompileAnswer, Compiled, CompileFailed, CompileRequest, CompileUnit
from gt.worker.compilation.inductor_private import compile_graph, find_vector_instructions
from gt.worker.compilation.socket_framing import FrameReader, FrameWriter
from gt.worker.compilation.tracing import UntraceableCall, trace

log = logging.getLogger("gt.compile")
_POLL_SECONDS = 1.0
_WAIT_FOR_FIRST_SECONDS = 60.0
_WAITING_FACTOR = 10
_STARVED_SECONDS, _STARVED_SHARE = 10.0, 0.1  # a job that has had less of a CPU in this time gets ordinary priority


class _Job(NamedTuple):
    key: str
    unit: CompileUnit
    pid: int
    pipe: int
    began: float
    deadline: float


class _Worker:
    """The connection of a worker, with the reader and the writer of its frames."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.reader = FrameReader(link)
        self.writer = FrameWriter(link)


class CompileServer:
    def __init__(self, directory: Path, limit: float, listener: socket.socket, niceness: int = 0) -> None:
        self._directory = directory
        self._limit = limit
        self._niceness = niceness
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._workers: set[_Worker] = set()
        self._answers: dict[str, bytes] = {}
        self._waiting: dict[str, list[_Worker]] = {}
        self._queue: deque[tuple[str, CompileUnit]] = deque()
        self._job: _Job | None = None
        self._requests = msgspec.msgpack.Decoder(CompileRequest)
        self._started = time.monotonic()
        self._had_workers = False
        self._stopping = False

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        while not self._stopping and not self._is_deserted():
            for key, _ in self._selector.select(_POLL_SECONDS):
                key.data()
            self._check_time()
            self._start_job()
        self._end_job()

    def stop(self) -> None:
        self._stopping = True

    def _is_deserted(self) -> bool:
        if self._had_workers:
            return not self._workers
        return time.monotonic() > self._started + _WAIT_FOR_FIRST_SECONDS

    # Workers

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        link.setblocking(False)
        worker = _Worker(link)
        self._workers.add(worker)
        self._had_workers = True
        self._selector.register(link, selectors.EVENT_READ, partial(self._receive, worker))

    def _receive(self, worker: _Worker) -> None:
        try:
            for data in worker.reader.read():
                self._take(worker, self._requests.decode(data))
            worker.writer.write()
        except (ConnectionLost, msgspec.MsgspecError) as error:
            log.info("a worker has gone: %s", error)
            self._drop(worker)

    def _take(self, worker: _Worker, request: CompileRequest) -> None:
        key = request.key
        if key in self._answers:
            worker.writer.write(self._answers[key])
        elif key in self._waiting:
            self._waiting[key].append(worker)
        else:
            self._waiting[key] = [worker]
            self._queue.append((key, request.unit))

    def _drop(self, worker: _Worker) -> None:
        self._selector.unregister(worker.link)
        worker.link.close()
        self._workers.discard(worker)

    def _answer(self, answer: CompileAnswer) -> None:
        data = self._answers[answer.key] = msgspec.msgpack.encode(answer)
        for worker in self._waiting.pop(answer.key, []):
            if worker in self._workers:
                with contextlib.suppress(ConnectionLost):  # noticed when it is read from
                    worker.writer.write(data)

    # Jobs

    def _start_job(self) -> None:
        if self._job is not None or not self._queue:
            return
        key, unit = self._queue.popleft()
        if not any(worker in self._workers for worker in self._waiting[key]):
            del self._waiting[key]
            return
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            os.nice(self._niceness)
            _compile_and_exit(self._directory, key, unit, writing, self._limit)
        os.close(writing)
        with contextlib.suppress(OSError):  # both processes call it: the child may have to be ended before it has run
            os.setpgid(pid, pid)
        now = time.monotonic()
        self._job = _Job(key, unit, pid, reading, now, now + _WAITING_FACTOR * self._limit)
        self._selector.register(reading, selectors.EVENT_READ, self._finish_job)

    def _finish_job(self) -> None:
        """The process of a unit has written its answer, or has ended without one."""
        job = self._job
        assert job is not None
        with open(job.pipe, "rb", closefd=False) as pipe:
            data = pipe.read()
        status, used = self._reap(job)
        try:
            answer = msgspec.msgpack.decode(data, type=CompileAnswer)
        except msgspec.MsgspecError:
            answer = CompileFailed(job.key, f"the compiler process ended with status {status}")
        is_late = isinstance(answer, CompileFailed) and used > self._limit
        self._answer(self._too_long(job) if is_late else answer)

    def _check_time(self) -> None:
        job = self._job
        if job is not None and (time.monotonic() > job.deadline or _cpu_seconds(job.pid) > self._limit):
            self._end_job()
            self._answer(self._too_long(job))
        elif job is not None and self._niceness and _is_starved(job):
            log.info("the machine is busy: a unit is compiled at ordinary priority")
            self._niceness = 0
            _set_group_niceness(0)
            self._end_job()
            self._queue.appendleft((job.key, job.unit))

    def _too_long(self, job: _Job) -> CompileFailed:
        return CompileFailed(job.key, f"it took longer than {self._limit:g} s (GT_COMPILE_TIMEOUT)")

    def _end_job(self) -> None:
        if self._job is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._job.pid, signal.SIGKILL)
            self._reap(self._job)

    def _reap(self, job: _Job) -> tuple[int, float]:
        """The exit status of a job, and the CPU time that it and its children took."""
        self._selector.unregister(job.pipe)
        os.close(job.pipe)
        self._job = None
        _, status, usage = os.wait4(job.pid, 0)
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _is_starved(job: _Job) -> bool:
    age = time.monotonic() - job.began
    return age > _STARVED_SECONDS and _cpu_seconds(job.pid) < _STARVED_SHARE * age


def _cpu_seconds(pid: int) -> float:
    """The CPU time of a process and of its children that have ended; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _compile_and_exit(directory: Path, key: str, unit: CompileUnit, pipe: int, limit: float) -> NoReturn:
    """Compile a unit in its own process, and write the answer."""
    parent = os.getppid()
    try:
        os.setpgid(0, 0)
        seconds = math.ceil(limit) + 1  # the server ends this process before, unless it is late
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # also of each process that this one starts
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal_at_parent_end(signal.SIGKILL)
        if os.getppid() == parent:
            answer = msgspec.msgpack.encode(compile_unit(directory, key, unit))
            with open(pipe, "wb") as target:
                target.write(answer)
    finally:
        os._exit(0)


def compile_unit(directory: Path, key: str, unit: CompileUnit) -> CompileAnswer:
    """Compile a unit in a new directory: an earlier server may have left one for the same unit."""
    began = time.monotonic()
    try:
        torch.set_num_threads(unit.threads)
        traced = trace(unit)
        own = Path(tempfile.mkdtemp(prefix=f"{key[:16]}-", dir=directory))
        path = compile_graph(traced.graph, traced.inputs, unit.threads, own)
    except UntraceableCall as error:
        return CompileFailed(key, f"it cannot be traced: {error}", error.call)
    except Exception as error:
        log.warning("a unit was not compiled", exc_info=True)
        return CompileFailed(key, f"{type(error).__name__}: {error}"[:2000])
    seconds = time.monotonic() - began
    return Compiled(key, str(path), traced.takes, traced.writes, traced.outputs, seconds)


def run_server(directory: Path, limit: float, niceness: int) -> None:
    """Serve the workers that connect to a private directory, whose lock this process has inherited."""
    signal_at_parent_end(signal.SIGCONT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    path = directory / private_directory.SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        try:
            _quietly(find_vector_instructions)
            _set_group_niceness(niceness)
            CompileServer(directory, limit, listener, niceness).serve()
        finally:
            private_directory.remove(directory)


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        log.warning("the vector instructions of this machine are not known", exc_info=True)


def _set_group_niceness(niceness: int) -> None:
    """The niceness of the session, which Linux may schedule as a group. Unlike that of a process it may be lowered."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))
