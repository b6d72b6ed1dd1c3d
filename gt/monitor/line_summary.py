"""What the workers did for each line of a program, summed up from the records of their commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from gt.core.message_events import ProgramWaited, WorkerRan
from gt.core.messages import Ran, Swapped
from gt.sharding.spec_text import describe_whole

SiteText: TypeAlias = Callable[[int], str]
"""A line of the program, by the id of its site."""


class CollectiveUse(msgspec.Struct, frozen=True):
    """Collectives of one kind: their number, and the bytes that all workers together received."""

    kind: str
    count: int
    bytes: int


class LineUse(msgspec.Struct, frozen=True):
    """A line of a program, empty for commands that belong to none, and its code. Times are nanoseconds.

    - `ops`: ops of the program, each counted once for all its workers; `commands`: these and moves, uploads and the
      like, by name
    - `layouts` of the results, and `changes`: pairs of the layout that a tensor had and the one that was needed
    - `bytes`: received by all workers, in all collectives
    - `worked` and `waited`: of all workers together, in commands and in exchanges; `worked_by_worker`: by worker
    - `program_waited`: the time that the program waited here for values
    """

    line: str
    code: str
    ops: int
    commands: dict[str, int]
    layouts: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]
    collectives: tuple[CollectiveUse, ...]
    bytes: int
    worked: int
    waited: int
    worked_by_worker: dict[int, int]
    program_waited: int


class LineSummary:
    """Sums up records by line. `site_text` names the lines of exchanges, which may be for another line than the command
    that waits for them."""

    def __init__(self, site_text: SiteText) -> None:
        self._site_text = site_text
        self._lines: dict[str, _Line] = {}
        self._swaps: Counter[tuple[int, int]] = Counter()

    def add(self, record: WorkerRan | ProgramWaited) -> None:
        if isinstance(record, ProgramWaited):
            self._line(record.site).program_waited += record.end - record.start
            return
        ran = record.ran
        waited = sum(swap.end - swap.start for swap in ran.swaps)
        self._line(record.site).add(record.worker, ran, ran.end - ran.start - waited)
        for swap in ran.swaps:
            self._swaps[record.worker, swap.target] += 1
            site = self._site_text(swap.site) if swap.site else record.site
            self._line(site).add_swap(swap, self._swaps[record.worker, swap.target])

    def _line(self, site: str) -> _Line:
        found = self._lines.get(site)
        if found is None:
            found = self._lines[site] = _Line()
        return found

    def lines(self, code_of: Callable[[str], str]) -> list[LineUse]:
        """The lines in the order in which they first did something."""
        return [line.use(site, code_of(site)) for site, line in self._lines.items()]


class _Line:
    """`_seen` are commands, by name and first output, which several workers have run."""

    def __init__(self) -> None:
        self.program_waited = 0
        self._ops = 0
        self._commands: Counter[str] = Counter()
        self._seen: set[tuple[str, int]] = set()
        self._layouts: dict[str, None] = {}
        self._changes: dict[tuple[str, str], None] = {}
        self._whole: dict[int, list[int]] = {}
        self._collectives: dict[str, set[tuple[int, int]]] = {}
        self._bytes: Counter[str] = Counter()
        self._worked: Counter[int] = Counter()
        self._waited = 0

    def add(self, worker: int, ran: Ran, worked: int) -> None:
        self._worked[worker] += worked
        output = ran.outputs[0] if ran.outputs else ran.start
        if (ran.op, output) not in self._seen:
            self._seen.add((ran.op, output))
            self._commands[ran.op] += 1
            self._ops += ran.ops
            self._layouts.update(dict.fromkeys(ran.layouts))
            self._changes.update(dict.fromkeys(ran.moves))
        if ran.outputs and not ran.layouts:
            self._whole.setdefault(output, []).append(worker)

    def add_swap(self, swap: Swapped, number: int) -> None:
        """`number` tells the exchanges for one tensor apart, so that each counts once for all its workers."""
        self._waited += swap.end - swap.start
        self._bytes[swap.kind] += sum(nbytes for _, nbytes in swap.receives)
        self._collectives.setdefault(swap.kind, set()).add((swap.target, number))

    def use(self, site: str, code: str) -> LineUse:
        whole = {tuple(sorted(set(workers))) for workers in self._whole.values()}
        collectives = [CollectiveUse(kind, len(found), self._bytes[kind]) for kind, found in self._collectives.items()]
        return LineUse(
            site,
            code,
            self._ops,
            dict(self._commands.most_common()),
            (*self._layouts, *[describe_whole(workers) for workers in sorted(whole)]),
            tuple(self._changes),
            tuple(sorted(collectives, key=lambda use: -use.bytes)),
            self._bytes.total(),
            self._worked.total(),
            self._waited,
            dict(sorted(self._worked.items())),
            self.program_waited,
        )
