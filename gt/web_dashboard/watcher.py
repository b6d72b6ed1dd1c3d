"""Reads a program at intervals while somebody looks, and keeps the latest records as JSON for all viewers.

All of it runs in one event loop. Each kind of reading may take a hundredth of the time: what takes longer is read less
often.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import os
import stat
import time
from collections.abc import Callable, Iterable

import msgspec

from gt.core.program_view import MemoryState, ProgramView
from gt.monitor.activity import ActivityMeter
from gt.web_dashboard.live_timeline import LiveTimeline
from gt.web_dashboard.page_records import CodeOfLine, Failures, Memory, Sessions, Status, Tensors, Traffic

LONGEST = 200  # characters of a line
MAX_FILES = 1024  # files of code that are kept
MAX_FILE = 1 << 20  # bytes of a file that is read: clients of a server name the files


@functools.lru_cache(maxsize=4096)
def code_of(line: str) -> str:
    """The text of `file:number`; empty if the file is not Python code, or not here."""
    file, _, number = line.rpartition(":")
    if not number.isdecimal():
        return ""
    if file not in linecache.cache and not _can_be_read(file):
        return ""
    return linecache.getline(file, int(number)).strip()[:LONGEST]


def _can_be_read(file: str) -> bool:
    """Whether it is a file of Python code: no pipe, which would be waited for, no device and nothing without an end."""
    if not file.endswith(".py") or not os.path.isabs(file) or len(linecache.cache) >= MAX_FILES:
        return False
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(file)
        return stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE
    return False


def code_of_lines(lines: Iterable[str]) -> tuple[CodeOfLine, ...]:
    return tuple([CodeOfLine(line, code_of(line)) for line in dict.fromkeys(lines) if line])


SAMPLE_SECONDS = 0.03  # between two looks at the ops of workers
STATUS_SECONDS = 0.5
STATUSES = 10  # rates are averages of this number: a worker counts a batch at its end, which may be seconds long
MEMORY_SECONDS = 1.0
LINGER_SECONDS = 3.0  # reading goes on this long after the last look of a viewer
SHARE = 100  # a kind of reading takes at most 1 / SHARE of the time
LINES_SHOWN = 40

_encode = msgspec.json.Encoder().encode


class _Reading:
    """Something that is read at intervals."""

    def __init__(self, seconds: float, read: Callable[[], None]) -> None:
        self._seconds = seconds
        self._read = read
        self._due = 0.0
        self.took = 0.0

    def read_if_due(self) -> None:
        if time.monotonic() < self._due:
            return
        start = time.thread_time()  # the time that this thread waits costs the program nothing
        self._read()
        self.took = time.thread_time() - start
        self._due = time.monotonic() + max(self._seconds, SHARE * self.took)

    def seconds_left(self) -> float:
        return self._due - time.monotonic()


class ProgramWatcher:
    """Reads a program for viewers. `published` has, by name, the number of a record's version and its JSON."""

    def __init__(self, view: ProgramView) -> None:
        self.timeline = LiveTimeline()
        self.published: dict[str, tuple[int, bytes]] = {}
        self.viewers = 0
        self.ended = asyncio.Event()
        self._view = view
        self._meter = ActivityMeter(STATUSES)
        self._sampling = _Reading(SAMPLE_SECONDS, self._sample)
        self._readings = (
            self._sampling,
            _Reading(STATUS_SECONDS, self._read_status),
            _Reading(MEMORY_SECONDS, self._read_memory),
            _Reading(MEMORY_SECONDS, self._read_traffic),
            _Reading(STATUS_SECONDS, self._read_failures),
        )
        self._wanted = asyncio.Event()
        self._until = 0.0
        self._watches = False

    def look(self) -> None:
        """Somebody looks: read what is due now, and go on reading for a moment."""
        self._until = time.monotonic() + LINGER_SECONDS
        self._wanted.set()
        if not self._watches:
            self._watches = True
            self._view.watch_lines(True)
        self._read_all()

    async def run(self) -> None:
        """Read while somebody looks; sleep otherwise."""
        while True:
            await self._wanted.wait()
            while time.monotonic() < self._until:
                self._read_all()
                await asyncio.sleep(max(self._sampling.seconds_left(), SAMPLE_SECONDS / 4))
            self._wanted.clear()
            self.stop()

    def stop(self) -> None:
        self._watches = False
        self._view.watch_lines(False)
        self.timeline.clear()
        self._meter = ActivityMeter(STATUSES)

    def _read_all(self) -> None:
        for reading in self._readings:
            reading.read_if_due()

    def _publish(self, name: str, record: msgspec.Struct) -> None:
        data = _encode(record)
        version, before = self.published.get(name, (0, b""))
        if data != before:
            self.published[name] = version + 1, data

    def _sample(self) -> None:
        self.timeline.add(time.monotonic_ns(), self._view.read_workers())

    def _read_status(self) -> None:
        status = self._view.read_status()
        activity = self._meter.add(status)
        code = code_of_lines(worker.site for worker in activity.workers)
        took, refused = self._sampling.took, activity.refused
        self._publish("status", Status(status.time, activity.workers, self.viewers, took, code, refused))
        self._publish("sessions", Sessions(activity.sessions))

    def _read_memory(self) -> None:
        memory = self._view.read_memory()
        self._publish("memory", _with_code(memory))
        self._publish("tensors", Tensors(memory.largest))

    def _read_traffic(self) -> None:
        self._publish("traffic", Traffic(self._view.read_traffic()))

    def _read_failures(self) -> None:
        count, failures, lost = msgspec.structs.astuple(self._view.read_failures())
        code = code_of_lines(failure.line for failure in failures)
        self._publish("failures", Failures(count, failures, lost, code))


def _with_code(memory: MemoryState) -> Memory:
    known = [line for line in memory.lines if line.line]
    rest = tuple(line for line in memory.lines if not line.line)
    shown = (*known[:LINES_SHOWN], *rest)
    code = code_of_lines(line.line for line in shown)
    return Memory(memory.nbytes, memory.tensors, memory.copied, shown, memory.dropped, code)
