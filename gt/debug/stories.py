"""Every event of one tensor: `gt.debug.story`."""

from __future__ import annotations

from typing import NamedTuple

from gt.client.session import Session
from gt.client.session_reads import read_story
from gt.client.tensor import Tensor
from gt.core.ids import short_id
from gt.core.messages import CreateTensor, FetchTensor, RunOp, StoryEvent
from gt.sharding.spec_text import join_numbers

CUT_OFF = "what happened before that is not kept: a dispatcher keeps the latest 4096 messages of a program"


class TensorEvent(NamedTuple):
    """One event of a tensor. `kind` is created, uploaded, copied (for the op and line that needed the copy), moved (to
    another layout, for good), written (`result` is its next version), used (`result` is what the op made), read, freed
    or copy freed. `tensor` and `result` are names as in the tape; `line` is empty where it is not known.

    >>> x = gt.ones(2)
    >>> y = x + 1
    >>> [(event.kind, event.op) for event in gt.debug.story(x).events]
    [('created', 'aten.ones.default'), ('used', 'aten.add.Tensor')]
    """

    kind: str
    tensor: str
    result: str
    op: str
    line: str
    workers: tuple[int, ...]
    layout: str


class Story:
    """The events of a tensor in the order of the program. `layout` is its layout now, `copies` are the layouts of its
    copies; `missing` says why it has no value. It `is_complete` if it begins with the tensor's creation.

    >>> story = gt.debug.story(gt.ones(2))
    >>> story.layout, story.is_complete
    ('worker 0', True)
    """

    def __init__(
        self, name: str, events: list[TensorEvent], layout: str, copies: tuple[str, ...], missing: str
    ) -> None:
        self.name = name
        self.events = events
        self.layout = layout
        self.copies = copies
        self.missing = missing

    @property
    def is_complete(self) -> bool:
        return bool(self.events) and self.events[0].kind in ("created", "uploaded")

    def __str__(self) -> str:
        state = f"has no value: {self.missing}" if self.missing else f"now {self.layout}"
        copies = f"; copies: {', '.join(self.copies)}" if self.copies else ""
        cut = [] if self.is_complete else [f"  ... {CUT_OFF}"]
        return "\n".join([f"{self.name} {state}{copies}", *cut, *map(_line, self.events)])

    __repr__ = __str__


def story(tensor: Tensor) -> Story:
    """All that happened to a tensor, as far as it is remembered: `print(gt.debug.story(x))`. For a view, the story of
    the tensor whose memory it shows.

    >>> x = gt.ones(2)
    >>> y = x.exp()
    >>> print(gt.debug.story(x))
    %1 float32[2] now worker 0
      created ... aten.ones.default ...
      used ... aten.exp.default ...
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"gt.debug.story takes a GT tensor, not {type(tensor).__name__}")
    storage = tensor._ref.storage
    session = storage.session
    told = read_story(storage)
    events = _with_direct_reads(session, told.events)
    described = [_described(session, event) for event in events]
    return Story(
        f"%{short_id(storage.id)} {storage.geometry.meta()}", described, told.layout, told.copies, told.missing
    )


def _with_direct_reads(session: Session, events: tuple[StoryEvent, ...]) -> list[StoryEvent]:
    """The events with the reads of a worker in this process, which the dispatcher does not see. The tape has them."""
    ids = {each for event in events for each in (event.tensor, event.result if event.kind == "written" else 0)}
    merged = list(events)
    newest = 0
    for instruction in [each for taped in session.outbox.tape for each in session.expand(taped)]:
        if isinstance(instruction, RunOp):
            newest = max(newest, *instruction.outputs)
        elif isinstance(instruction, CreateTensor):
            newest = max(newest, instruction.id)
        elif isinstance(instruction, FetchTensor) and not instruction.request and instruction.id in ids:
            place = sum(event.newest <= newest for event in merged)
            merged.insert(place, StoryEvent("read", instruction.id, 0, "", 0, (0,), "", newest))
    return merged


def _described(session: Session, event: StoryEvent) -> TensorEvent:
    line = session.sites.text(event.site) if event.site else ""
    result = f"%{short_id(event.result)}" if event.result else ""
    return TensorEvent(event.kind, f"%{short_id(event.tensor)}", result, event.op, line, event.workers, event.layout)


def _line(event: TensorEvent) -> str:
    ids = f"{event.tensor} -> {event.result}" if event.result else event.tensor
    where = event.layout or f"on {join_numbers(event.workers)}"
    return f"  {event.kind:<10}  {ids:<12}  {event.op:<28}  {event.line:<24}  {where}".rstrip()
