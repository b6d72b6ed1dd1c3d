"""Processes for tasks, each with a session of its own. A process that dies or hangs fails its current task only."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from types import TracebackType

import torch

from tests.conformance.opdb import Failure, Task, TaskReport, run_task
from tests.conformance.sides import GTSide, make_side

SILENCE_SECONDS = 300.0  # a task is given up when its process has not reported for this long
LEAVE_SECONDS = 5.0
_spawn = multiprocessing.get_context("spawn")


class Pool:
    def __init__(self, jobs: int, mode: str) -> None:
        self._seats = [Seat(mode) for _ in range(jobs)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for seat in self._seats:
            seat.pipe.close()  # all leave at the same time
        for seat in self._seats:
            seat.stop()

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskReport]:
        """Reports as they come, in no order."""
        waiting = deque(tasks)
        while waiting or any(seat.task for seat in self._seats):
            for seat in self._seats:
                if seat.task is None and waiting:
                    seat.give(waiting.popleft())
            wait([seat.pipe for seat in self._seats if seat.task], timeout=1.0)
            for seat in self._seats:
                report = seat.take()
                if report is not None:
                    yield report


class Seat:
    """A process and the task that it has."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.task: Task | None = None
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_serve, args=(theirs, self._mode), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        if not self.process.is_alive():  # it died between two tasks
            self.stop()
            self._start()
        self.task, self._since = task, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # take() will find that it died
            self.pipe.send(task)

    def take(self) -> TaskReport | None:
        """The report on the task if there is one, also when the process died of it."""
        if self.task is None:
            return None
        if self.pipe.poll():
            try:
                report: TaskReport = self.pipe.recv()
            except (EOFError, ConnectionError):
                return self._restart("died")
            self.task = None
            return report
        if time.monotonic() - self._since > SILENCE_SECONDS:
            return self._restart(f"did not answer for {SILENCE_SECONDS:.0f} s")
        return None

    def _restart(self, how: str) -> TaskReport:
        task, self.task = self.task, None
        assert task is not None
        self.stop()
        failure = Failure(task.op, "process", task.dtype, -1, f"the process {how} (exit {self.process.exitcode})", "")
        self._start()
        return TaskReport(task, failures=[failure])

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(LEAVE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, mode: str) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GT_CHECK_GEOMETRY"] = "1"
    side = make_side(mode)
    side.reopen()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            break
        pipe.send(_report(task, side))
    side.close()


def _report(task: Task, side: GTSide) -> TaskReport:
    try:
        return run_task(task, side)
    except Exception as error:  # torch could not make the samples, or the harness is wrong
        side.reopen()
        reason = f"harness: {type(error).__name__}: {error}"
        return TaskReport(task, failures=[Failure(task.op, "samples", task.dtype, -1, reason, "")])
