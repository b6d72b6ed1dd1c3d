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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import msgspec
import torch

from gt.core.errors import ConnectionLost
from gt.wire.lifeline import signal_at_parent_end
from gt.worker.bound_ops import BoundOp
from gt.worker.compilation import private_directory
from gt.worker.compilation.compile_units import (
    CompileAnswer,
    Compiled,
    CompileFailed,
    CompileRequest,
    CompileUnit,
    Output,
    UnitCall,
)
from gt.worker.compilation.dynamic_scalars import DYNAMIC_FORMS, DynamicScalar, has_dynamic_scalars
from gt.worker.compilation.inductor_private import compile_graph, fake_mode, find_vector_instructions, trace_function
from gt.worker.compilation.socket_framing import FrameReader, FrameWriter
from gt.worker.engines.default_dtype import WithDefaultDtype, without_default_dtype
from gt.worker.engines.pytorch_engine import PyTorchEngine
from gt.worker.engines.torch_private import storage_identity

Graph: TypeAlias = torch.fx.GraphModule


class UntraceableCall(Exception):
    """Raised for the call of a unit that cannot be traced."""

    def __init__(self, call: int, reason: str) -> None:
        super().__init__(reason)
        self.call = call


class TracedUnit(NamedTuple):
    """A unit as a graph, and the fields of `Compiled` that follow from it. `inputs` are tensors without memory."""

    graph: Graph
    inputs: list[torch.Tensor]
    takes: tuple[int, ...]
    writes: tuple[int, ...]
    outputs: tuple[Output, ...]


class TracingEngine(PyTorchEngine):
    """The engine of the CPU for tensors without memory, with dynamic forms for numbers that are not constants."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def aliases(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        return storage_identity(view) == storage_identity(base)

    def shortcut(self, op: str, values: Sequence[torch.Tensor], scalars: Any = ()) -> Callable[..., Any]:
        return self.resolve(op)

    def resolve(self, op: str) -> Callable[..., Any]:
        plain = without_default_dtype(super().resolve(op))
        form = DYNAMIC_FORMS.get(op, plain)

        def run(*args: Any, **kwargs: Any) -> Any:
            return form(*args, **kwargs) if has_dynamic_scalars((*args, *kwargs.values())) else plain(*args, **kwargs)

        return WithDefaultDtype(run, torch.float32)


def trace(unit: CompileUnit) -> TracedUnit:
    """The graph of a unit. Raises UntraceableCall."""
    engine = TracingEngine()
    run = _TracedRun(engine, unit)
    with fake_mode(), torch.no_grad():
        inputs = [engine.empty(meta) for meta in unit.inputs]
        takes = run.takes
        given = [inputs[position] for position in takes]
        if run.dynamic_count:
            given.insert(0, torch.empty(run.dynamic_count, dtype=torch.float64))
        graph = trace_function(run, given)
    return TracedUnit(graph, given, takes, run.writes, run.outputs)


class _TracedRun:
    """A unit as a function of tensors. A call notes which inputs it writes, and the `outputs`."""

    def __init__(self, engine: TracingEngine, unit: CompileUnit) -> None:
        self._engine = engine
        self._unit = unit
        self._ops = [self._bind(number, call) for number, call in enumerate(unit.calls)]
        written = {call.inputs[position] for call in unit.calls for position in call.signature.writes}
        used = {register for call in unit.calls for register in call.inputs}
        self.dynamic_count = sum(scalar is None for scalar in unit.scalars)
        self.takes = tuple(register for register in range(len(unit.inputs)) if register in used)
        self.writes = tuple(register for register in self.takes if register in written)
        self.outputs: tuple[Output, ...] = ()

    def _bind(self, number: int, call: UnitCall) -> BoundOp:
        try:
            return BoundOp(self._engine, call.signature)
        except Exception as error:
            raise UntraceableCall(number, f"{call.signature.op}: {error}") from error

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scalars, tensors = self._scalars(given)
        registers: dict[int, torch.Tensor] = dict(zip(self.takes, tensors, strict=True))
        for number, (bound, call) in enumerate(zip(self._ops, self._unit.calls, strict=True)):
            try:
                self._run_call(bound, call, registers, scalars)
            except Exception as error:
                reason = f"{call.signature.op}: {type(error).__name__}: {error}"
                raise UntraceableCall(number, reason.splitlines()[0][:1000]) from error
        return self._results(registers)

    def _scalars(self, given: Sequence[torch.Tensor]) -> tuple[list[Any], Sequence[torch.Tensor]]:
        if not self.dynamic_count:
            return list(self._unit.scalars), given
        places = iter(range(self.dynamic_count))
        scalars = [DynamicScalar(given[0][next(places)]) if scalar is None else scalar for scalar in self._unit.scalars]
        return scalars, given[1:]

    def _run_call(
        self, bound: BoundOp, call: UnitCall, registers: dict[int, torch.Tensor], scalars: Sequence[Any]
    ) -> None:
        values = [registers[register] for register in call.inputs]
        results = bound.call(values, tuple(scalars[position] for position in call.scalars))
        if len(results) < len(call.outputs):
            raise RuntimeError(f"it gives {len(results)} tensors where {len(call.outputs)} were expected")
        strides = call.strides or (None,) * len(results)
        for register, result, stride in zip(call.outputs, results, strides, strict=False):
            if register >= 0:
                if not isinstance(result, torch.Tensor):
                    raise TypeError("it gives no tensor for an output")
                registers[register] = result if stride is None else self._engine.with_strides(result, stride)

    def _results(self, registers: dict[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors that the graph gives: the first one in each memory that is new and has live tensors."""
        owners: dict[int, int] = {}
        for register, tensor in registers.items():
            owners.setdefault(storage_identity(tensor), register)
        count = len(self._unit.inputs)
        owned = [owners[storage_identity(registers[register])] for register in self._unit.live]
        results = [register for register in dict.fromkeys(owned) if register >= count]
        places = {register: count + number for number, register in enumerate(results)}
        self.outputs = tuple(
            _output(registers[register], registers[owner], places.get(owner, owner))
            for register, owner in zip(self._unit.live, owned, strict=True)
        )
        return tuple(registers[register] for register in results)


def _output(tensor: torch.Tensor, owner: torch.Tensor, source: int) -> Output:
    if tensor is owner:
        return Output(source)
    offset = int(tensor.storage_offset()) - int(owner.storage_offset())
    return Output(source, (tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), offset))


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
