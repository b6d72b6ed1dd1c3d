"""Finds repeated runs of ops in the batches that a program sends, and sends each as one instruction.

A run of up to 64 ops that was seen before becomes a segment: it is defined once, and each repetition is a RunSegment.
Repetitions are found when a batch is sent, among ops that the program has already issued: an unexpected op is sent by
itself, and no instruction has to be revoked. Ops are compared by op, shapes, constants, lines, scopes and the pattern
of their tensors; scalars and random keys may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from typing import NamedTuple, TypeAlias, get_args

from gt.client.segment_templates import Match, OpRun, Template, Tokens, are_in_order
from gt.core.message_fields import id_fields
from gt.core.messages import (
    MAX_SEGMENT,
    BeginModule,
    BetweenOps,
    DropCopies,
    ForgetOps,
    FreeTensors,
    Instruction,
    NoteGradient,
    PlaceTensor,
    RunOp,
)
from gt.core.settings import HotPathSettings
from gt.core.signatures import Signature

MAX_CANDIDATES = 1 << 11  # runs that are remembered, and segments
MAX_OF_START = 8  # remembered runs that begin with the same op
MAX_TEMPLATES = 4  # segments of the same ops with other patterns of tensors
MAX_DEVIATIONS = 256  # reasons and lines that are counted
MAX_TENSORS = 1 << 11  # inputs and outputs of a segment's ops

Interleaved: TypeAlias = FreeTensors | NoteGradient | BeginModule | DropCopies | PlaceTensor
"""An instruction that does not end a run of ops. It is sent with a segment; a FreeTensors mostly before or after it."""


# Instructions that ignore tensors that were freed before.
_IGNORING_FREED = (FreeTensors, DropCopies)


class _Codes(dict[type, int]):
    """A number for each kind of instruction, so that batches can be searched as bytes."""

    def __missing__(self, kind: type) -> int:
        return _BARRIER


_OP, _INTERLEAVED, _BARRIER = range(3)
_code_of = _Codes({RunOp: _OP, **dict.fromkeys(get_args(Interleaved), _INTERLEAVED)}).__getitem__


class HotPathStats(NamedTuple):
    """Counts of what was repeated: `segments` that were defined, `hits` the RunSegments that were sent, `ops` the ops
    in these, and `misses` the ops that were sent one by one. `deviations` counts, by reason and site, how often another
    op came than the one that followed last time."""

    segments: int
    hits: int
    ops: int
    misses: int
    deviations: dict[tuple[str, int], int]


class _Candidate:
    """A run of ops that was seen `count` times, and the segments that were made of it."""

    __slots__ = ("count", "templates", "tokens")

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.count = 1
        self.templates: list[Template] = []


class _Found(NamedTuple):
    """A repetition of a candidate, which ends before the op `end` of a run. `match`: its segment, None if no segment
    may be used; `is_new`: the segment still has to be defined."""

    end: int
    match: Match | None = None
    is_new: bool = False


class SegmentMatcher:
    """Replaces repeated runs of ops in batches by RunSegments. `new_id` gives ids to segments; `signatures` are those
    of the ops. Used by one thread at a time."""

    def __init__(
        self, settings: HotPathSettings, new_id: Callable[[], int], signatures: Callable[[], Mapping[int, Signature]]
    ) -> None:
        self._settings = settings
        self._new_id = new_id
        self._signatures = signatures
        self._starts: dict[int, list[_Candidate]] = {}
        self._candidates = 0
        self._defined: list[int] = []
        self._forgotten: list[int] = []
        self._unseen: list[RunOp] = []  # the last ops that belong to no run seen before: they become one
        self._unseen_tensors = 0
        self._joined: set[tuple[int, ...]] = set()
        self._is_stale = False
        self._last: Template | None = None
        self._expected: Template | None = None
        self._segments = self._hits = self._ops = self._misses = 0
        self._deviations: Counter[tuple[str, int]] = Counter()

    @property
    def shortest(self) -> int | None:
        """The fewest ops of a segment; None if there are no segments."""
        return self._settings.shortest if self._settings.is_on else None

    def stats(self) -> HotPathStats:
        return HotPathStats(self._segments, self._hits, self._ops, self._misses, dict(self._deviations))

    def count_runs(self, hits: int, ops: int, *, new: int = 0) -> None:
        """Count segments that `gt.compile` has sent, and those of them that are new."""
        self._segments += new
        self._hits += hits
        self._ops += ops

    def clear(self) -> None:
        """Forget all segments at the next batch, because ops that they name are forgotten. Any thread may call this."""
        self._is_stale = True

    def _clear(self) -> None:
        self._is_stale = False
        self._starts, self._candidates = {}, 0
        self._forgotten, self._defined = [*self._forgotten, *self._defined], []
        self._unseen, self._unseen_tensors = [], 0
        self._last = self._expected = None
        self._joined.clear()

    def compress(self, batch: list[Instruction], *, is_final: bool) -> tuple[list[Instruction], list[Instruction]]:
        """The batch with its repeated runs as RunSegments, and the instructions at its end that may begin a segment
        whose other ops are still to come: they are left for the next batch. There are none if `is_final`."""
        if self._is_stale:
            self._clear()
        if not self._settings.is_on:
            return batch, []
        sent, rest = self._compress(batch, is_final)
        if self._forgotten:
            sent.append(ForgetOps(tuple(self._forgotten)))
            self._forgotten = []
        return sent, rest

    def _compress(self, batch: list[Instruction], is_final: bool) -> tuple[list[Instruction], list[Instruction]]:
        """Compress each run of a batch. Runs end at instructions that are neither RunOps nor Interleaved."""
        codes = bytes(map(_code_of, map(type, batch)))
        if _OP not in codes:
            return batch, []
        ops = codes.count(_OP)
        if is_final and ops < self._settings.shortest and self._expected is None and not self._unseen:
            self._misses += ops  # too few ops for a segment, as in a loop of reads
            self._last = None
            return batch, []
        sent: list[Instruction] = []
        start = 0
        while start < len(batch):
            begin = codes.find(_OP, start)
            if begin < 0:
                break
            sent += batch[start:begin]
            barrier = codes.find(_BARRIER, begin)
            end = barrier if barrier >= 0 else len(batch)
            is_open = barrier < 0 and not is_final
            kept = self._compress_run(batch[begin:end], codes[begin:end], sent, is_open)
            if kept < end - begin:
                return sent, batch[begin + kept :]
            start = end
        return sent + batch[start:], []

    def _compress_run(
        self, instructions: list[Instruction], codes: bytes, sent: list[Instruction], is_open: bool
    ) -> int:
        """Compress a run of RunOps with other instructions between them, and add it to `sent`. `is_open`: the run may
        go on in the next batch. Returns the number of instructions that were sent."""
        ops: list[RunOp] = instructions  # type: ignore[assignment]
        interleaved: list[tuple[int, Interleaved]] = []  # each with the number of ops before it
        if _INTERLEAVED in codes:
            ops, number = [], codes.find(_INTERLEAVED)
            begin = 0
            while number >= 0:
                ops += instructions[begin:number]  # type: ignore[arg-type]
                interleaved.append((len(ops), instructions[number]))  # type: ignore[arg-type]
                begin, number = number + 1, codes.find(_INTERLEAVED, number + 1)
            ops += instructions[begin:]  # type: ignore[arg-type]
        found, kept = self._find(OpRun(ops), is_open)
        interleaved = [other for other in interleaved if other[0] <= kept]
        self._send(ops[:kept], found, interleaved, sent)
        return kept + len(interleaved) if kept < len(ops) else len(codes)

    # Finding

    def _find(self, run: OpRun, is_open: bool) -> tuple[list[_Found], int]:
        """The segments in a run, and the number of ops to send in this batch."""
        starts, count = self._starts, len(run.ops)
        segments: list[_Found] = []
        position = 0
        while position < count:
            candidates = starts.get(run.op_ids[position])
            found = self._find_at(run, position, candidates) if candidates is not None else None
            if found is None:
                if is_open and candidates is not None and self._may_go_on(run, position, candidates):
                    return segments, position
                self._misses += 1
                self._expect(None, run, position)
                self._add_unseen(run.ops[position])
                position += 1
                continue
            if found.match is not None:
                self._join(run, segments, position, found.end)
                segments.append(found)
            self._end_unseen()
            if found.match is not None:
                self._expect(found.match.template, run, position)
                self._hits += 1
                self._ops += found.end - position
            else:
                self._expect(None, run, position)
                self._misses += found.end - position
            position = found.end
        if not is_open:
            if segments:
                self._join(run, segments, count, count)
            self._end_unseen()
        return segments, count

    def _find_at(self, run: OpRun, start: int, candidates: list[_Candidate]) -> _Found | None:
        """The longest run seen before that begins at `start`. Hot path."""
        for candidate in candidates:
            if candidate.tokens.match(run, start):
                return self._repeat(run, start, candidate)
        return None

    def _repeat(self, run: OpRun, start: int, candidate: _Candidate) -> _Found:
        """The repetition of a candidate: by one of its segments, by a new segment, or by none if it is too early for
        one."""
        end = start + candidate.tokens.count
        for template in candidate.templates:
            match = template.match(run, start)
            if match is not None:
                return _Found(end, match)
        candidate.count += 1
        if candidate.count < self._settings.repetitions or len(candidate.templates) >= MAX_TEMPLATES:
            return _Found(end)
        signatures = self._signatures()
        if not signatures.keys() >= set(candidate.tokens.op_ids):
            return _Found(end)  # ops that are about to be forgotten
        if not are_in_order(run.outputs[start:end]):
            return _Found(end)
        template = Template(self._new_id(), candidate.tokens, run.ops[start:end])
        match = template.match(run, start)
        if match is None:
            return _Found(end)
        candidate.templates.append(template)
        self._defined.append(template.definition.segment_id)
        self._segments += 1
        return _Found(end, match, is_new=True)

    def _may_go_on(self, run: OpRun, start: int, candidates: list[_Candidate]) -> bool:
        """Whether the ops from `start` on are the beginning of a run seen before."""
        return any(candidate.tokens.match_beginning(run, start) for candidate in candidates)

    def _expect(self, found: Template | None, run: OpRun, position: int) -> None:
        """Note the segment that was found, or None, and count a deviation if another one was expected."""
        if self._expected is not None and self._expected is not found:
            place, reason = self._expected.tokens.first_difference(run, position)
            key = (reason, run.sites[place])
            if key in self._deviations or len(self._deviations) < MAX_DEVIATIONS:
                self._deviations[key] += 1
        if self._last is not None and found is not None:
            self._last.successor = found
        self._last, self._expected = found, found.successor if found is not None else None

    # Candidates

    def _join(self, run: OpRun, segments: list[_Found], start: int, end: int) -> None:
        """Remember a repetition, from `start` to `end`, together with the segment or the unseen ops before it as one
        longer candidate, if that is not too long. The first steps of a program define ops between their ops, which
        makes candidates short; in later steps these follow each other."""
        begin = segments[-1].match.start if segments and segments[-1].match is not None else 0
        unseen = start - (segments[-1].end if segments else 0)
        if segments and end - begin > MAX_SEGMENT:
            begin = segments[-1].end
        joined = tuple(run.op_ids[begin:end])
        if begin == start or not self._settings.shortest <= end - begin <= MAX_SEGMENT:
            return
        if joined in self._joined or unseen > len(self._unseen):
            return
        if sum(map(len, run.inputs[begin:end])) < MAX_TENSORS:
            self._joined.add(joined)
            self._add_candidate(Tokens(run, begin, end))

    def _add_unseen(self, op: RunOp) -> None:
        self._unseen.append(op)
        self._unseen_tensors += len(op.inputs) + len(op.outputs)
        if len(self._unseen) >= MAX_SEGMENT or self._unseen_tensors >= MAX_TENSORS:
            self._end_unseen()

    def _end_unseen(self) -> None:
        """Make a candidate of the last ops that belong to no candidate."""
        if not self._unseen:
            return
        ops, self._unseen, self._unseen_tensors = self._unseen, [], 0
        if len(ops) < self._settings.shortest or any(not op.outputs for op in ops):
            return
        self._add_candidate(Tokens(OpRun(ops), 0, len(ops)))

    def _add_candidate(self, tokens: Tokens) -> None:
        if self._candidates >= MAX_CANDIDATES or len(self._defined) >= MAX_CANDIDATES:
            self._clear()
        candidates = self._starts.setdefault(tokens.op_ids[0], [])
        if len(candidates) >= MAX_OF_START:
            candidates.remove(min(candidates, key=lambda candidate: candidate.count))
        candidates.append(_Candidate(tokens))
        candidates.sort(key=lambda candidate: -candidate.tokens.count)  # the longest first
        self._candidates += 1

    # Sending

    def _send(
        self, ops: list[RunOp], found: list[_Found], interleaved: list[tuple[int, Interleaved]], sent: list[Instruction]
    ) -> None:
        """Add the instructions of a run to `sent`: its segments, the ops between them, and the `interleaved`
        instructions, each with the number of ops before it."""
        dead, freed = _dead_ids(ops, found, interleaved) if interleaved else ([set[int]()] * len(found), set[int]())
        position, later = 0, iter([*interleaved, (len(ops) + 1, None)])
        place, other = next(later)
        for number, segment in enumerate([*found, None]):
            start = segment.match.start if segment is not None and segment.match is not None else len(ops)
            while place <= start and other is not None:
                sent += ops[position:place]
                position = max(position, place)
                _add_interleaved(other, freed, sent)
                place, other = next(later)
            sent += ops[position:start]
            if segment is None or segment.match is None:
                break
            if segment.is_new:
                sent.append(segment.match.template.definition)
            position, between, frees = segment.end, [], []
            while place < position and other is not None:
                if isinstance(other, FreeTensors):
                    frees.append(other)
                else:
                    between.append(BetweenOps(place - start, other))
                place, other = next(later)
            late: list[Instruction] = []
            for each in frees:
                _add_interleaved(each, freed, late)
            if late:
                late = _free_in_time(late, segment.match, between, sent)
            sent += [segment.match.instruction(dead[number], tuple(between)), *late]


def _dead_ids(
    ops: list[RunOp], found: list[_Found], interleaved: list[tuple[int, Interleaved]]
) -> tuple[list[set[int]], set[int]]:
    """For each segment, the freed ids whose last use is in it; and the other freed ids: those that other instructions
    than PlaceTensor name, or a PlaceTensor after their last use. Hot path."""
    frees = [other.ids for _, other in interleaved if type(other) is FreeTensors]
    freed = set(chain.from_iterable(frees))
    placed = {other.id: place for place, other in interleaved if type(other) is PlaceTensor and other.id in freed}
    named = [
        id_fields(type(other)).all(other)
        for _, other in interleaved
        if type(other) not in (*_IGNORING_FREED, PlaceTensor)
    ]
    others = freed.intersection(chain.from_iterable(named))
    freed -= others
    dead: list[set[int]] = []
    end = len(ops)
    for segment in reversed(found):  # the first segment from the end that names an id is the last to use it
        match = segment.match
        assert match is not None
        if segment.end < end:
            after = freed.intersection(chain.from_iterable([op.inputs for op in ops[segment.end : end]]))
            freed -= after
            others |= after
        dying = freed.intersection(chain(match.externals, match.outputs))
        freed -= dying
        if placed:
            late = {ident for ident in dying & placed.keys() if match.last_use(ident) < placed[ident]}
            dying -= late
            others |= late
        dead.append(dying)
        end = match.start
    dead.reverse()
    return dead, others | freed


def _free_in_time(
    frees: list[Instruction], match: Match, between: list[BetweenOps], sent: list[Instruction]
) -> list[Instruction]:
    """Frees for after a segment, which may be a whole step. Those of tensors that it does not name, whose last use was
    before it, are sent now, and those of tensors that it only places after their last use are put between its ops."""
    others = [each.instruction for each in between if type(each.instruction) not in (*_IGNORING_FREED, PlaceTensor)]
    named = {ident for other in others for ident in id_fields(type(other)).all(other)}
    placed = {each.instruction.id: each.position for each in between if type(each.instruction) is PlaceTensor}
    used = {*match.externals, *match.outputs}
    freed = [ident for free in frees for ident in free.ids]  # type: ignore[union-attr]
    last = {
        ident
        for ident in placed.keys() - named
        if ident not in used or match.last_use(ident) < match.start + placed[ident]
    }
    for ident in last.intersection(freed):
        _free_after_place(ident, between)
    needed = used.union(named, placed)
    early = tuple([ident for ident in freed if ident not in needed])
    late = tuple([ident for ident in freed if ident in needed and ident not in last])
    sent += [FreeTensors(early)] if early else []
    return [FreeTensors(late)] if late else []


def _free_after_place(ident: int, between: list[BetweenOps]) -> None:
    """Free a tensor right after the last PlaceTensor that names it."""
    number = max(number for number, each in enumerate(between) if getattr(each.instruction, "id", 0) == ident)
    between.insert(number + 1, BetweenOps(between[number].position, FreeTensors((ident,))))


def _add_interleaved(other: Interleaved, freed: set[int], sent: list[Instruction]) -> None:
    if type(other) is not FreeTensors:
        sent.append(other)
        return
    ids = other.ids if freed.issuperset(other.ids) else tuple([ident for ident in other.ids if ident in freed])
    if ids:
        sent.append(other if ids is other.ids else FreeTensors(ids))
