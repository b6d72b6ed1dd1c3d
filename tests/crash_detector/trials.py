"""Runs each op in a process of its own, which records each call first: its parent then knows the call that ended it."""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gt.worker.engines import PyTorchEngine
from tests.crash_detector import fence
from tests.crash_detector.guarded import guarded
from tests.crash_detector.mutations import mutate
from tests.crash_detector.recording import Call

SECONDS_PER_CALL = 2.0  # of CPU time
SECONDS_PER_PROCESS = 120.0
BYTES = 4 << 30
ENDS_PER_OP = 6  # then the rest of the op's calls is left out


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended, and in which call."""

    op: str
    signal: str
    change: str
    arguments: str
    said: str

    @property
    def is_a_crash(self) -> bool:
        """A call that takes too long is none, nor is an instruction that this processor lacks (bfloat16 products)."""
        return self.signal not in ("SIGPROF", "SIGKILL", "SIGILL")

    def json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(slots=True)
class _Child:
    op: str
    pid: int
    progress: mmap.mmap
    stderr: Any
    deadline: float


class Trials:
    """`calls` are tried by op; `resolve` gives the function of an op."""

    def __init__(self, calls: dict[str, list[Call]], resolve: Callable[[str], Callable[..., Any]], jobs: int) -> None:
        self._calls = calls
        self._resolve = resolve
        self._jobs = jobs
        self._ends: dict[str, int] = {}

    def run(self, ops: Sequence[str]) -> Iterator[End]:
        waiting = deque([(op, 0) for op in ops])
        children: dict[int, _Child] = {}
        while waiting or children:
            while waiting and len(children) < self._jobs:
                child = self._start(*waiting.popleft())
                children[child.pid] = child
            for child, status in _ended(children):
                end = self._judge(child, status)
                if end is not None:
                    yield end
                    self._ends[end.op] = self._ends.get(end.op, 0) + 1
                    if self._ends[end.op] < ENDS_PER_OP:
                        waiting.appendleft((end.op, _read(child.progress) + 1))

    def _cases(self, op: str) -> Iterator[tuple[str, Call, bool]]:
        for call in self._calls[op]:
            for change, mutated in mutate(call):
                for at_end in (True, False):
                    yield f"{change}, guard {'after' if at_end else 'before'}", mutated, at_end

    def _start(self, op: str, first: int) -> _Child:
        progress, stderr = mmap.mmap(-1, 8), tempfile.TemporaryFile()
        pid = os.fork()
        if pid == 0:
            try:
                self._try_all(op, first, progress, stderr.fileno())
            finally:
                os._exit(0)
        return _Child(op, pid, progress, stderr, time.monotonic() + SECONDS_PER_PROCESS)

    def _try_all(self, op: str, first: int, progress: mmap.mmap, stderr: int) -> None:
        os.dup2(stderr, 2)
        os.dup2(stderr, 1)
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        function = self._resolve(op)
        fence.start()
        for place, (_, call, at_end) in enumerate(islice(self._cases(op), first, None), first):
            progress[:] = struct.pack("q", place)
            signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_CALL)
            _try(function, call, at_end)

    def _judge(self, child: _Child, status: int) -> End | None:
        if not os.WIFSIGNALED(status):
            return None
        place = _read(child.progress)
        change, call, _ = next(islice(self._cases(child.op), place, None))
        child.stderr.seek(0)
        said = child.stderr.read()[-500:].decode(errors="replace")
        name = signal.Signals(os.WTERMSIG(status)).name
        return End(child.op, name, change, repr(tree_map(_describe, (call.args, call.kwargs))), said)


def _try(function: Callable[..., Any], call: Call, at_end: bool) -> None:
    def guard(leaf: Any) -> Any:
        return guarded(leaf, at_end) if isinstance(leaf, torch.Tensor) else leaf

    try:
        args, kwargs = tree_map(guard, (call.args, call.kwargs))
        function(*args, **kwargs)
    except Exception:  # an error is what a wrong call should give
        return


def _ended(children: dict[int, _Child]) -> Iterator[tuple[_Child, int]]:
    for child in list(children.values()):
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid:
            yield children.pop(pid), status
        elif time.monotonic() > child.deadline:
            os.kill(child.pid, signal.SIGKILL)
    time.sleep(0.001)


def _read(progress: mmap.mmap) -> int:
    return struct.unpack("q", progress[:])[0]


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    values = str(leaf.tolist()) if leaf.numel() <= 8 else "..."
    return f"<{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} {values}>"


def worker_functions(engine: PyTorchEngine) -> Callable[[str], Callable[..., Any]]:
    """Ops as a worker calls them."""

    def resolve(op: str) -> Callable[..., Any]:
        try:
            function = engine.resolve(op)
        except NotImplementedError:
            return lambda *args, **kwargs: None

        def call(*args: Any, **kwargs: Any) -> Any:
            with engine.isolated():
                return function(*args, **kwargs)

        return call

    return resolve
