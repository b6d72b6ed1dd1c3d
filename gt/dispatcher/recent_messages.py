"""The latest messages that were sent for a session. They are kept as they are, and told as events when asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from gt.core.messages import Command, RunOp, RunSegment, WorkerCreateTensor
from gt.dispatcher.message_descriptions import expand_command
from gt.dispatcher.message_queue import Outgoing, ToWorkers
from gt.dispatcher.session_records import SessionRecord

KEPT = 4096  # messages of a session; a segment is one
MAX_SITES = 1 << 14  # of tensors that outlive the messages which made them


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
        """The commands, with those of segments one by one, and their workers."""
        for sent in self._batches:
            for message in sent:
                if isinstance(message, ToWorkers):
                    for command in expand_command(session, message.command):
                        yield message.workers, command


def _made_by(session: SessionRecord, command: Command, wanted: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Those of the tensors that a command has made, with the site of each. `wanted` is sorted."""
    if not isinstance(command, RunSegment):
        yield from [made for made in _made_by_one(command) if _contains(wanted, made[0])]
        return
    part = session.segment_parts.get(command.segment_id)
    if part is None:
        return
    body = part.body
    at = bisect_left(wanted, command.first)
    if at < len(wanted) and wanted[at] <= command.first + max(body.offsets, default=0):
        ids = [(body.id(command, slot), op.site) for op in body.ops for slot in op.outputs]
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
