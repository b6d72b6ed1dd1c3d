"""The memory of a program's tensors on each worker, by line: `gt.debug.memory`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gt.client import active_session
from gt.client.session import Session
from gt.client.session_reads import read_memory
from gt.core.errors import SessionError
from gt.core.messages import MemoryUse, WorkerMemory
from gt.core.tables import print_bytes
from gt.core.tracebacks import ends_on_users_line


class MemoryBytes(NamedTuple):
    """Bytes of tensors in their own layouts, and of copies in other layouts.

    >>> with gt.debug.memory() as m:
    ...     x = gt.ones(100)
    >>> m.workers[0].live.total
    400
    """

    originals: int
    copies: int

    @property
    def total(self) -> int:
        return self.originals + self.copies


class LineMemory(NamedTuple):
    """The bytes that a line of the program takes: of the tensors that it made, and of the copies that it needed. `line`
    is "before" for all that was there before the block.

    >>> with gt.debug.memory() as m:
    ...     x = gt.ones(100)
    >>> [line.live.originals for line in m.workers[0].lines]
    [400]
    """

    line: str
    live: MemoryBytes
    peak: MemoryBytes


class MemoryOfWorker(NamedTuple):
    """The bytes at the end of the block, and when they were most. `most_copies` are the most bytes of copies at any
    time. `lines` have the same bytes by line, the line with most bytes at the peak first.

    >>> with gt.debug.memory() as m:
    ...     x = gt.ones(100)
    ...     y = (x + 1).sum()
    >>> m.workers[0].peak.total > m.workers[0].live.total
    True
    """

    live: MemoryBytes
    peak: MemoryBytes
    most_copies: int
    lines: tuple[LineMemory, ...]


class Memory:
    """The memory that the tensors of this program take on each worker inside `with gt.debug.memory() as m:`. Tensors
    that share memory are counted once. Memory that an op takes while it runs is not counted.

    >>> with gt.debug.memory() as m:
    ...     x = gt.ones(100)
    >>> m.peak
    400
    """

    def __init__(self) -> None:
        self.workers: dict[int, MemoryOfWorker] = {}

    @ends_on_users_line
    def __enter__(self) -> Memory:
        session = self._session = active_session.current()
        if session.is_measuring:
            raise SessionError("memory is being measured already; leave its block before entering another one")
        read_memory(session, watch=True)
        session.is_measuring = True
        return self

    def __exit__(self, *error: object) -> None:
        self._session.is_measuring = False
        answer = read_memory(self._session, watch=False)
        self.workers = {worker: _memory(self._session, memory) for worker, memory in answer.workers}

    @property
    def peak(self) -> int:
        """The most bytes that any worker held."""
        return max((memory.peak.total for memory in self.workers.values()), default=0)

    def __str__(self) -> str:
        if not self.workers:
            return "no memory was recorded: print this after its block, `with gt.debug.memory() as m: ...`"
        rows = [("worker", "live", "peak", "copies at the peak", "line")]
        for worker, memory in self.workers.items():
            rows.append((str(worker), *_printed(memory.live, memory.peak), "all lines"))
            rows += [("", *_printed(line.live, line.peak), line.line) for line in memory.lines]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join([_aligned(row, widths) for row in rows])

    __repr__ = __str__


def memory() -> Memory:
    """Record the memory of tensors inside: `with gt.debug.memory() as m: ...; print(m.workers[0].peak.total)`.

    >>> with gt.debug.memory() as m:
    ...     x = gt.ones(100)
    >>> m.workers[0].peak.total
    400
    """
    return Memory()


def _printed(live: MemoryBytes, peak: MemoryBytes) -> tuple[str, str, str]:
    return print_bytes(live.total), print_bytes(peak.total), print_bytes(peak.copies)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    *numbers, line = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
    return "  ".join([*numbers, line.strip()])


def _memory(session: Session, memory: WorkerMemory) -> MemoryOfWorker:
    by_line: dict[str, list[MemoryUse]] = {}
    for use in memory.uses:
        by_line.setdefault(session.sites.text(use.site) if use.site else "before", []).append(use)
    lines = [LineMemory(line, *_bytes(uses)) for line, uses in by_line.items()]
    lines.sort(key=lambda line: -line.peak.total)
    return MemoryOfWorker(*_bytes(memory.uses), memory.most_copies, tuple(lines))


def _bytes(uses: Iterable[MemoryUse]) -> tuple[MemoryBytes, MemoryBytes]:
    """The bytes now, and at the peak."""
    originals, copies = [use for use in uses if not use.is_copy], [use for use in uses if use.is_copy]
    live = MemoryBytes(sum(use.live for use in originals), sum(use.live for use in copies))
    return live, MemoryBytes(sum(use.peak for use in originals), sum(use.peak for use in copies))
