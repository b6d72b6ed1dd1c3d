"""Finds the lines that wrote tensors, in the batches of instructions of the last moment.

The dispatcher only appends each batch, and drops it where the reader is too slow: a program that is looked at runs as
fast as before. The reader looks for the few tensors that it wants to know of, by the ranges of their ids.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gt.core.ids import session_of
from gt.core.messages import CreateTensor, Instruction, QueryOp, Redistribute, RunOp, RunProgram
from gt.core.program import Program
from gt.dispatcher.state_records import SessionRecord

LIMIT = 1 << 14  # batches that wait for the reader


class _Batch(NamedTuple):
    session: SessionRecord
    instructions: Sequence[Instruction]


class RecentBatches:
    """The latest batches. The dispatcher calls `note`, the reader everything else. `dropped` counts batches."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.dropped = 0
        self._limit = limit
        self._batches: deque[_Batch] = deque()
        self._lines: dict[int, str] = {}
        self._missed: set[int] = set()  # missed at the last look
        self._unknown: set[int] = set()  # missed twice: their batches are gone

    def note(self, session: SessionRecord, batch: Sequence[Instruction]) -> None:
        if len(self._batches) < self._limit:
            self._batches.append(_Batch(session, batch))
        else:
            self.dropped += 1

    def find_lines(self, idents: Sequence[int]) -> dict[int, str]:
        """The lines that wrote these tensors, of those that were written since the first look. Batches are forgotten,
        and so are the lines of all other tensors."""
        known = {ident: self._lines[ident] for ident in idents if ident in self._lines}
        wanted = {*idents} - known.keys() - self._unknown
        known |= _search(self._take(), wanted)
        # A batch is noted when it has been carried out, so a tensor may be seen before its batch.
        missed = wanted - known.keys()
        self._unknown = self._unknown.intersection(idents) | (missed & self._missed)
        self._lines, self._missed = known, missed
        return known

    def _take(self) -> list[_Batch]:
        return [self._batches.popleft() for _ in range(len(self._batches))]


def _search(batches: Iterable[_Batch], wanted: set[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    ordered = {session: sorted(idents) for session, idents in _by_session(wanted).items()}
    for session, instructions in batches:
        idents = ordered.get(session.ident)
        if idents is None or not _overlaps(idents, session, instructions):
            continue
        for instruction in instructions:
            for ident, site in _written(session, instruction, idents):
                if ident in wanted and site:
                    found[ident] = session.site(site)
    return found


def _by_session(idents: Iterable[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for ident in idents:
        groups.setdefault(session_of(ident), []).append(ident)
    return groups


def _overlaps(idents: Sequence[int], session: SessionRecord, instructions: Sequence[Instruction]) -> bool:
    """Whether a batch may have made one of these tensors: a client gives ids in the order of its instructions."""
    first = next((low for each in instructions if (low := _range(session, each)[0])), 0)
    last = next((high for each in reversed(instructions) if (high := _range(session, each)[1])), 0)
    at = bisect_right(idents, last)
    return at > 0 and idents[at - 1] >= first


def _range(session: SessionRecord, instruction: Instruction) -> tuple[int, int]:
    """The first and the last id that an instruction gives to a tensor; zeros if it gives none."""
    if isinstance(instruction, RunProgram):
        program = _program(session, instruction)
        return (0, 0) if program is None else (instruction.first, instruction.first + program.made - 1)
    written = [ident for ident, _ in _written_by_one(instruction)]
    return (min(written), max(written)) if written else (0, 0)


def _written(session: SessionRecord, instruction: Instruction, idents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The tensors that an instruction writes, each with its site."""
    if not isinstance(instruction, RunProgram):
        yield from _written_by_one(instruction)
        return
    program = _program(session, instruction)
    if program is None or not _overlaps(idents, session, (instruction,)):
        return
    for op in program.ops:
        for slot in op.outputs:
            yield program.id(instruction, slot), op.site


def _written_by_one(instruction: Instruction) -> Iterator[tuple[int, int]]:
    if isinstance(instruction, RunOp):
        yield from [(ident, instruction.site) for ident in instruction.outputs]
    elif isinstance(instruction, CreateTensor):
        yield instruction.id, instruction.site
    elif isinstance(instruction, Redistribute):
        yield instruction.output, instruction.site
    elif isinstance(instruction, QueryOp):
        yield from [(ident, instruction.site) for ident in instruction.written]
        yield instruction.first, instruction.site


def _program(session: SessionRecord, run: RunProgram) -> Program | None:
    record = session.programs.get(run.program_id)
    return record.program if record is not None else None
