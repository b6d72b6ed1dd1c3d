"""Finds repeated runs of instructions in the batches that a program sends, and sends each as one instruction.

A run of up to 128 instructions that was seen before becomes a program: it is defined once, and each repetition is a
RunProgram. Repetitions are found when a batch is sent, among instructions that were already issued: an unexpected one
is sent by itself, and none has to be revoked. Instructions are compared by op, shapes, constants, lines, scopes and the
pattern of their tensors; scalars and random keys may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from typing import NamedTuple, get_args

from gt.client.program_templates import Kind, Match, StepRun, Template, Tokens, are_dense, named_ids
from gt.core.messages import MAX_STEPS, ForgetOps, FreeTensors, Instruction, ProgramStep, RunOp
from gt.core.settings import HotPathSettings
from gt.core.signatures import Signature

MAX_CANDIDATES = 1 << 11  # runs that are remembered, and programs
MAX_OF_START = 8  # remembered runs that begin with the same instruction
MAX_TEMPLATES = 4  # programs of the same instructions with other patterns of tensors
MAX_DEVIATIONS = 256  # reasons and lines that are counted
MAX_TENSORS = 1 << 11  # inputs and outputs of a program's steps


class _Codes(dict[type, int]):
    """A number for each kind of instruction, so that batches can be searched as bytes."""

    def __missing__(self, kind: type) -> int:
        return _BARRIER


_OP, _STEP, _FREE, _BARRIER = range(4)  # an op, another step, a FreeTensors, an instruction that ends a run
_code_of = _Codes({**dict.fromkeys(get_args(ProgramStep), _STEP), RunOp: _OP, FreeTensors: _FREE}).__getitem__


class HotPathStats(NamedTuple):
    """Counts of what was repeated: `segments` that were defined, `hits` the RunPrograms that were sent, `ops` the ops
    in these, and `misses` the ops that were sent one by one. `deviations` counts, by reason and site, how often another
    op came than the one that followed last time."""

    segments: int
    hits: int
    ops: int
    misses: int
    deviations: dict[tuple[str, int], int]


class _Candidate:
    """A run that was seen `count` times, and the programs that were made of it."""

    __slots__ = ("count", "templates", "tokens")

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.count = 1
        self.templates: list[Template] = []


class _Found(NamedTuple):
    """A repetition of a candidate, which ends before the instruction `end` of a run. `match`: its program, None if no
    program may be used; `is_new`: the program still has to be defined."""

    end: int
    match: Match | None = None
    is_new: bool = False


class ProgramMatcher:
    """Replaces repeated runs of instructions in batches by RunPrograms. `new_id` gives ids to programs; `signatures`
    are those of the ops. Used by one thread at a time."""

    def __init__(
        self, settings: HotPathSettings, new_id: Callable[[], int], signatures: Callable[[], Mapping[int, Signature]]
    ) -> None:
        self._settings = settings
        self._new_id = new_id
        self._signatures = signatures
        self._starts: dict[Kind, list[_Candidate]] = {}
        self._candidates = 0
        self._defined: list[int] = []
        self._forgotten: list[int] = []
        self._unseen: list[ProgramStep] = []  # the last instructions of no run seen before: they become one
        self._unseen_tensors = 0
        self._joined: set[tuple[Kind, ...]] = set()
        self._is_stale = False
        self._last: Template | None = None
        self._expected: Template | None = None
        self._programs = self._hits = self._ops = self._misses = 0
        self._deviations: Counter[tuple[str, int]] = Counter()

    @property
    def shortest(self) -> int | None:
        """The fewest instructions of a program; None if there are no programs."""
        return self._settings.shortest if self._settings.is_on else None

    def stats(self) -> HotPathStats:
        return HotPathStats(self._programs, self._hits, self._ops, self._misses, dict(self._deviations))

    def count_runs(self, hits: int, ops: int, *, new: int = 0) -> None:
        """Count programs that `gt.compile` has sent, and those of them that are new."""
        self._programs += new
        self._hits += hits
        self._ops += ops

    def clear(self) -> None:
        """Forget all programs at the next batch, because ops that they name are forgotten. Any thread may call this."""
        self._is_stale = True

    def _clear(self) -> None:
        self._is_stale = False
        self._starts, self._candidates = {}, 0
        self._forgotten, self._defined = [*self._forgotten, *self._defined], []
        self._unseen, self._unseen_tensors = [], 0
        self._last = self._expected = None
        self._joined.clear()

    def compress(self, batch: list[Instruction], *, is_final: bool) -> tuple[list[Instruction], list[Instruction]]:
        """The batch with its repeated runs as RunPrograms, and the instructions at its end that may begin a program
        whose other steps are still to come: they are left for the next batch. There are none if `is_final`."""
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
        """Compress each run of a batch. Runs end at instructions that are neither steps of programs nor
        FreeTensors."""
        codes = bytes(map(_code_of, map(type, batch)))
        if _OP not in codes:
            return batch, []
        ops = codes.count(_OP)
        if is_final and ops < self._settings.shortest and self._expected is None and not self._unseen:
            self._misses += ops  # too few ops for a program, as in a loop of reads
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
        """Compress a run of steps with FreeTensors between them, and add it to `sent`. `is_open`: the run may go on in
        the next batch. Returns the number of instructions that were sent."""
        steps: list[ProgramStep] = instructions  # type: ignore[assignment]
        frees: list[tuple[int, FreeTensors]] = []  # each with the number of steps before it
        if _FREE in codes:
            steps, number, begin = [], codes.find(_FREE), 0
            while number >= 0:
                steps += instructions[begin:number]  # type: ignore[arg-type]
                frees.append((len(steps), instructions[number]))  # type: ignore[arg-type]
                begin, number = number + 1, codes.find(_FREE, number + 1)
            steps += instructions[begin:]  # type: ignore[arg-type]
        found, kept = self._find(StepRun(steps, only_ops=_STEP not in codes), is_open)
        frees = [free for free in frees if free[0] <= kept]
        _send(steps[:kept], found, frees, sent)
        return kept + len(frees) if kept < len(steps) else len(codes)

    # Finding

    def _find(self, run: StepRun, is_open: bool) -> tuple[list[_Found], int]:
        """The programs in a run, and the number of instructions to send in this batch."""
        starts, count = self._starts, len(run.steps)
        programs: list[_Found] = []
        position = 0
        while position < count:
            candidates = starts.get(run.kinds[position])
            found = self._find_at(run, position, candidates) if candidates is not None else None
            if found is None:
                if is_open and candidates is not None and self._may_go_on(run, position, candidates):
                    return programs, position
                self._misses += type(run.steps[position]) is RunOp
                self._expect(None, run, position)
                self._add_unseen(run, position)
                position += 1
                continue
            if found.match is not None:
                self._join(run, programs, position, found.end)
                programs.append(found)
            self._end_unseen()
            if found.match is not None:
                self._expect(found.match.template, run, position)
                self._hits += 1
                self._ops += len(found.match.template.tokens.op_ids)
            else:
                self._expect(None, run, position)
                self._misses += sum(type(step) is RunOp for step in run.steps[position : found.end])
            position = found.end
        if not is_open:
            if programs:
                self._join(run, programs, count, count)
            self._end_unseen()
        return programs, count

    def _find_at(self, run: StepRun, start: int, candidates: list[_Candidate]) -> _Found | None:
        """The longest run seen before that begins at `start`. Hot path."""
        for candidate in candidates:
            if candidate.tokens.match(run, start):
                return self._repeat(run, start, candidate)
        return None

    def _repeat(self, run: StepRun, start: int, candidate: _Candidate) -> _Found:
        """The repetition of a candidate: by one of its programs, by a new program, or by none if it is too early for
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
        if not are_dense(tuple(chain.from_iterable(run.outputs[start:end]))):
            return _Found(end)
        template = Template(self._new_id(), candidate.tokens, run.steps[start:end])
        match = template.match(run, start)
        if match is None:
            return _Found(end)
        candidate.templates.append(template)
        self._defined.append(template.definition.program_id)
        self._programs += 1
        return _Found(end, match, is_new=True)

    def _may_go_on(self, run: StepRun, start: int, candidates: list[_Candidate]) -> bool:
        """Whether the instructions from `start` on are the beginning of a run seen before."""
        return any(candidate.tokens.match_beginning(run, start) for candidate in candidates)

    def _expect(self, found: Template | None, run: StepRun, position: int) -> None:
        """Note the program that was found, or None, and count a deviation if another one was expected."""
        if self._expected is not None and self._expected is not found:
            place, reason = self._expected.tokens.first_difference(run, position)
            key = (reason, run.sites[place])
            if key in self._deviations or len(self._deviations) < MAX_DEVIATIONS:
                self._deviations[key] += 1
        if self._last is not None and found is not None:
            self._last.successor = found
        self._last, self._expected = found, found.successor if found is not None else None

    # Candidates

    def _join(self, run: StepRun, programs: list[_Found], start: int, end: int) -> None:
        """Remember a repetition, from `start` to `end`, together with the program or the unseen ops before it as one
        longer candidate, if that is not too long. The first steps of a program define ops between their ops, which
        makes candidates short; in later steps these follow each other."""
        begin = programs[-1].match.start if programs and programs[-1].match is not None else 0
        unseen = start - (programs[-1].end if programs else 0)
        if programs and end - begin > MAX_STEPS:
            begin = programs[-1].end
        joined = tuple(run.kinds[begin:end])
        if begin == start or not self._settings.shortest <= end - begin <= MAX_STEPS:
            return
        if joined in self._joined or unseen > len(self._unseen):
            return
        if sum(map(len, run.inputs[begin:end])) < MAX_TENSORS:
            self._joined.add(joined)
            self._add_candidate(Tokens(run, begin, end))

    def _add_unseen(self, run: StepRun, position: int) -> None:
        self._unseen.append(run.steps[position])
        self._unseen_tensors += len(run.inputs[position]) + len(run.outputs[position])
        if len(self._unseen) >= MAX_STEPS or self._unseen_tensors >= MAX_TENSORS:
            self._end_unseen()

    def _end_unseen(self) -> None:
        """Make a candidate of the last instructions that belong to no candidate."""
        if not self._unseen:
            return
        steps, self._unseen, self._unseen_tensors = self._unseen, [], 0
        if len(steps) < self._settings.shortest or any(type(step) is RunOp and not step.outputs for step in steps):
            return
        self._add_candidate(Tokens(StepRun(steps, only_ops=False), 0, len(steps)))

    def _add_candidate(self, tokens: Tokens) -> None:
        if self._candidates >= MAX_CANDIDATES or len(self._defined) >= MAX_CANDIDATES:
            self._clear()
        candidates = self._starts.setdefault(tokens.kinds[0], [])
        if len(candidates) >= MAX_OF_START:
            candidates.remove(min(candidates, key=lambda candidate: candidate.count))
        candidates.append(_Candidate(tokens))
        candidates.sort(key=lambda candidate: -candidate.tokens.count)  # the longest first
        self._candidates += 1


# Sending


def _send(
    steps: list[ProgramStep], found: list[_Found], frees: list[tuple[int, FreeTensors]], sent: list[Instruction]
) -> None:
    """Add the instructions of a run to `sent`: its programs, the steps between them, and FreeTensors, each with the
    number of steps before it. Ids that die in a program are freed by it; those that it does not name, before it, since
    it may be a whole step."""
    dead, freed = _dead_ids(steps, found, frees) if frees else ([set[int]()] * len(found), set[int]())
    position, later = 0, iter([*frees, (len(steps) + 1, None)])
    place, free = next(later)
    for number, program in enumerate([*found, None]):
        start = program.match.start if program is not None and program.match is not None else len(steps)
        while place <= start and free is not None:
            sent += [*steps[position:place], *_free(freed.intersection(free.ids))]
            position = max(position, place)
            place, free = next(later)
        sent += steps[position:start]
        if program is None or program.match is None:
            break
        if program.is_new:
            sent.append(program.match.template.definition)
        position, ids = program.end, set[int]()
        while place < position and free is not None:
            ids.update(freed.intersection(free.ids))
            place, free = next(later)
        late = ids.intersection(chain(program.match.inputs, program.match.outputs)) if ids else ids
        sent += [*_free(ids - late), program.match.instruction(dead[number]), *_free(late)]


def _free(ids: set[int]) -> list[Instruction]:
    return [FreeTensors(tuple(sorted(ids)))] if ids else []


def _dead_ids(
    steps: list[ProgramStep], found: list[_Found], frees: list[tuple[int, FreeTensors]]
) -> tuple[list[set[int]], set[int]]:
    """For each program, the freed ids that no later step names; and the other freed ids. Hot path."""
    freed = set(chain.from_iterable([free.ids for _, free in frees]))
    others: set[int] = set()
    dead: list[set[int]] = []
    end = len(steps)
    for program in reversed(found):  # the first program from the end that names an id is the last to use it
        match = program.match
        assert match is not None
        if program.end < end:
            after = freed.intersection(chain.from_iterable(map(named_ids, steps[program.end : end])))
            freed -= after
            others |= after
        dying = freed.intersection(chain(match.inputs, match.outputs))
        freed -= dying
        dead.append(dying)
        end = match.start
    dead.reverse()
    return dead, others | freed
