"""The story of a tensor: the events of the commands that concern it, its versions and its copies."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from gt.core.ids import MAX_RESULTS, is_dispatcher_id
from gt.core.messages import (
    Command,
    FreeTensors,
    QueryOp,
    ReadStory,
    RunOp,
    RunProgram,
    StoryEvent,
    StoryRead,
    WorkerCreateTensor,
    WorkerFetchTensor,
)
from gt.core.program_view import FailureState
from gt.dispatcher.message_descriptions import expand_command
from gt.dispatcher.message_queue import Outgoing, ToWorkers
from gt.dispatcher.op_definitions import MOVE, OpFacts
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.sharding.spec_text import describe_spec, describe_whole

MAX_EVENTS = 1 << 14  # latest events of a story

SentCommand: TypeAlias = tuple[tuple[int, ...], Command]
"""The workers that a command was sent to, and the command."""


def tell_story(
    state: State,
    session: SessionRecord,
    commands: Iterable[SentCommand],
    failures: Mapping[int, FailureState],
    read: ReadStory,
) -> StoryRead:
    """The events of a tensor among the commands that were sent. `failures` are by the tensors that ops failed to
    make."""
    sent, ident = list(commands), read.id
    facts = _facts(session)
    tale = _Tale(facts, _versions(sent, facts, ident))
    for workers, command in sent:
        tale.follow(workers, command)
    tensor = state.tensors.get(ident)
    layout = describe_spec(tensor.spec) if tensor is not None else ""
    copies = tuple(describe_spec(spec) for spec in state.copies.get(ident, ()))
    missing = _why_missing(state, session, ident) or _why_failed(sent, failures, ident)
    return StoryRead(read.request, tuple(tale.events[-MAX_EVENTS:]), layout, copies, missing)


def _why_missing(state: State, session: SessionRecord, ident: int) -> str:
    if ident not in state.missing:
        return ""
    cause = state.missing[ident].cause
    if isinstance(cause, int):
        return f"worker {cause} was lost"
    return f"{cause.op} failed ({session.site(cause.site)}): {cause.message}"


def _why_failed(sent: Sequence[SentCommand], failures: Mapping[int, FailureState], ident: int) -> str:
    """The failure of the op that was to make a tensor, or one of those that it was made of."""
    causes = dict(failures)
    for _, command in sent if causes else ():
        if isinstance(command, RunOp):
            cause = next((causes[each] for each in command.inputs if each in causes), None)
            if cause is not None:
                causes.update(dict.fromkeys(command.outputs, cause))
    found = causes.get(ident)
    return f"{found.op} failed ({found.line or 'no line'}): {found.message}" if found is not None else ""


def _facts(session: SessionRecord) -> dict[int, OpFacts]:
    """Facts about the ops and programs of a session by their ids, with those that were forgotten."""
    found = dict(session.forgotten)
    for record in session.ops.values():
        name = record.signature.op
        found[record.op_id] = OpFacts(name, record.signature.writes)
        for cached in record.plans.values():
            if cached.plan.program is not None:
                found[cached.op_id] = OpFacts.of_program(name, cached.plan)
    for cached in session.move_plans.values():
        found[cached.op_id] = OpFacts.of_program(MOVE, cached.plan)
    return found


def _layouts(facts: OpFacts) -> list[str]:
    return [describe_spec(spec) for spec in facts.layouts]


def _written(command: RunOp | QueryOp, facts: OpFacts | None) -> list[tuple[int, int]]:
    """The ids of tensors that a command writes to, before and after it."""
    if facts is None or not facts.writes:
        return []
    renamed = command.written if isinstance(command, QueryOp) else command.outputs[-len(facts.writes) :]
    return [(command.inputs[position], new) for position, new in zip(facts.writes, renamed, strict=True)]


def _versions(sent: Sequence[SentCommand], facts: dict[int, OpFacts], ident: int) -> set[int]:
    """The ids that a tensor has had."""
    versions = {ident}
    for _, command in reversed(sent):
        if isinstance(command, RunOp | QueryOp):
            versions.update(old for old, new in _written(command, facts.get(command.op_id)) if new in versions)
    return versions


class _Tale:
    """Collects the events of a tensor. `_copies` are the ids of its copies, with the positions of the events that made
    them: the op that needs a copy is the first one that uses it."""

    def __init__(self, facts: dict[int, OpFacts], versions: set[int]) -> None:
        self.events: list[StoryEvent] = []
        self._facts = facts
        self._versions = versions
        self._copies: dict[int, int] = {}
        self._newest = 0

    def follow(self, workers: tuple[int, ...], command: Command) -> None:
        if isinstance(command, RunOp | QueryOp):
            self._follow_op(workers, command)
        elif isinstance(command, WorkerCreateTensor):
            self._newest = max(self._newest, command.id)
            if command.id in self._versions:
                self._add("uploaded", command.id, 0, "", command.site, workers)
        elif isinstance(command, WorkerFetchTensor):
            if command.id in self._versions or command.id in self._copies:
                self._add("read", command.id, 0, "", command.site, workers)
        elif isinstance(command, FreeTensors):
            for ident in command.ids:
                if self._copies.pop(ident, None) is not None:
                    self._add("copy freed", ident, 0, "", 0, workers)
                elif ident in self._versions:
                    self._add("freed", ident, 0, "", 0, workers)

    def _follow_op(self, workers: tuple[int, ...], command: RunOp | QueryOp) -> None:
        outputs = command.outputs if isinstance(command, RunOp) else command.written
        self._newest = max([self._newest, *[ident for ident in outputs if not is_dispatcher_id(ident)]])
        facts = self._facts.get(command.op_id)
        if facts is not None and facts.is_move:
            self._follow_move(workers, command, outputs, facts)
            return
        name = facts.name if facts is not None else "(forgotten op)"
        written = dict(_written(command, facts))
        self._follow_inputs(workers, command, name, written, next(iter(outputs), 0))
        layouts = dict(zip(outputs, _layouts(facts), strict=False)) if facts is not None else {}
        for old, new in written.items():
            if new in self._versions:
                layout = layouts.get(new) or describe_whole(workers)
                self._add("written", old, new, name, command.site, workers, layout)
        for ident in self._made(command, outputs):
            if ident not in written.values():
                layout = layouts.get(ident) or describe_whole(workers)
                self._add("created", ident, 0, name, command.site, workers, layout)

    def _made(self, command: RunOp | QueryOp, outputs: Sequence[int]) -> list[int]:
        """The versions of the tensor that a command makes."""
        if isinstance(command, RunOp):
            return [ident for ident in outputs if ident in self._versions]
        return sorted(ident for ident in self._versions if command.first <= ident < command.first + MAX_RESULTS)

    def _follow_inputs(
        self, workers: tuple[int, ...], command: RunOp | QueryOp, name: str, written: dict[int, int], made: int
    ) -> None:
        for ident in dict.fromkeys(command.inputs):
            if ident in self._copies:
                event = self.events[self._copies[ident]]
                if not event.op:
                    self.events[self._copies[ident]] = replace(event, op=name)
            elif ident not in self._versions or ident in written:
                continue
            self._add("used", ident, made, name, command.site, workers)

    def _follow_move(
        self, workers: tuple[int, ...], command: RunOp | QueryOp, outputs: Sequence[int], facts: OpFacts
    ) -> None:
        """A move makes a copy, gives the tensor another layout, or makes another tensor of the program."""
        for source, target, layout in zip(command.inputs, outputs, _layouts(facts), strict=False):
            if source in self._versions and is_dispatcher_id(target):
                self._copies[target] = len(self.events)
                self._add("copied", source, target, "", command.site, workers, layout)
            elif target in self._versions:
                kind = "moved" if source == target or source in self._copies else "created"
                self._add(kind, target, 0, facts.name, command.site, workers, layout)
            elif source in self._versions:
                self._add("used", source, target, facts.name, command.site, workers)

    def _add(
        self,
        kind: str,
        tensor: int,
        result: int,
        op: str,
        site: int,
        workers: tuple[int, ...],
        layout: str = "",
    ) -> None:
        """Add an event; commands to several workers for the same thing are one."""
        event = StoryEvent(kind, tensor, result, op, site, workers, layout, self._newest)
        last = self.events[-1] if self.events else None
        if last is not None and kind in ("uploaded", "read") and replace(last, workers=workers) == event:
            self.events[-1] = replace(last, workers=(*last.workers, *workers))
        else:
            self.events.append(event)


# They are kept as they are, and turned into events on request.


KEPT = 4096  # messages of a session; a program is one
MAX_SITES = 1 << 14  # sites of tensors that outlive the messages which made them


class RecentMessages:
    """Whole batches of messages, the latest of them with KEPT messages in all or fewer. Of the tensors that outlive
    their messages, those in `tensors`, the sites of the lines that made them are kept."""

    def __init__(self, tensors: Collection[int] = ()) -> None:
        self._tensors = tensors
        self._sites: dict[int, int] = {}
        self._batches: deque[Sequence[Outgoing]] = deque()
        self._count = 0

    def add(self, sent: Sequence[Outgoing], *, has_bytes: bool) -> None:
        """Called for each batch. The bytes of uploads are not kept."""
        if has_bytes:
            sent = [replace(each, buffer=None) if isinstance(each, ToWorkers) else each for each in sent]
        self._batches.append(sent)
        self._count += len(sent)
        while self._count > KEPT:
            dropped = self._batches.popleft()
            self._count -= len(dropped)
            if self._tensors:
                self._keep_sites(dropped)

    def _keep_sites(self, sent: Sequence[Outgoing]) -> None:
        sites, tensors = self._sites, self._tensors
        for message in sent:
            if type(message) is ToWorkers:
                for ident, site in _made_by_one(message.command):
                    if ident in tensors:
                        sites[ident] = site
        if len(sites) > MAX_SITES:
            self._sites = {ident: site for ident, site in sites.items() if ident in tensors}
            while len(self._sites) > MAX_SITES // 2:
                del self._sites[next(iter(self._sites))]

    def find_sites(self, session: SessionRecord, idents: Iterable[int]) -> dict[int, int]:
        """The sites of the lines that made some tensors, of those that are known."""
        wanted = sorted(idents)
        found = {ident: self._sites[ident] for ident in wanted if ident in self._sites}
        for sent in self._batches:
            for message in sent:
                if isinstance(message, ToWorkers):
                    found.update(_made_by(session, message.command, wanted))
        return found

    def commands(self, session: SessionRecord) -> Iterator[tuple[tuple[int, ...], Command]]:
        """The commands, with those of programs one by one, and their workers."""
        for sent in self._batches:
            for message in sent:
                if isinstance(message, ToWorkers):
                    for command in expand_command(session, message.command):
                        yield message.workers, command


def _made_by(session: SessionRecord, command: Command, wanted: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Those of the tensors that a command has made, with the site of each. `wanted` is sorted."""
    if not isinstance(command, RunProgram):
        yield from [made for made in _made_by_one(command) if _contains(wanted, made[0])]
        return
    part = session.program_parts.get(command.program_id)
    if part is None:
        return
    program = part.program
    at = bisect_left(wanted, command.first)
    if at < len(wanted) and wanted[at] < command.first + program.made:
        ids = [(program.id(command, slot), op.site) for op in program.ops for slot in op.outputs]
        yield from [made for made in ids if _contains(wanted, made[0])]


def _made_by_one(command: Command) -> Sequence[tuple[int, int]]:
    if type(command) is RunOp:
        return [(ident, command.site) for ident in command.outputs]
    if type(command) is WorkerCreateTensor:
        return [(command.id, command.site)]
    return ()


def _contains(wanted: Sequence[int], ident: int) -> bool:
    at = bisect_left(wanted, ident)
    return at < len(wanted) and wanted[at] == ident
