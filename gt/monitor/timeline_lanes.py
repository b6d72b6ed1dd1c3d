"""The lanes of a timeline: the activities of each worker in the order of time, and their time by line of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from gt.core.tables import count, print_bytes, print_seconds, short_site
from gt.monitor.timeline_model import TRANSFER, Exchanged, Timeline, Work
from gt.sharding.op_kinds import CONTRACTION, CREATION_OP, MOVEMENT, OPTIMIZER, OTHER, POINTWISE_OP, REDUCTION_OP

EXCHANGE, WAIT, IDLE = "exchange", "wait", "idle"  # kinds of segments, besides those of ops
NO_LINE = "no line"  # stands in place of a line of the program, for what GT does by itself
SHORT_SHOWN = 5  # names shown of short ops that are drawn together


class Segment(NamedTuple):
    """A part of a lane. `name` is short, `title` tells all."""

    start: float
    end: float
    kind: str
    name: str
    title: str
    site: str


def segments_of(timeline: Timeline) -> dict[int, list[Segment]]:
    """The lane of each worker, in the order of time."""
    lanes: dict[int, list[Segment]] = {worker: [] for worker in timeline.workers}
    for work in timeline.work:
        lanes[work.worker].append(_work_segment(work))
    for exchange in timeline.exchanges:
        for part in exchange:
            lanes[part.worker] += _exchange_segments(part)
    return {worker: sorted(segments) for worker, segments in lanes.items()}


def _work_segment(work: Work) -> Segment:
    scope = f", scope {work.scope}" if work.scope else ""
    title = f"{work.op} {work.site}: {print_seconds(work.end - work.start)}{scope}"
    name = work.op.removeprefix("aten.").partition(".")[0]
    return Segment(work.start, work.end, work.kind, name, title, work.site)


def _exchange_segments(part: Exchanged) -> Iterator[Segment]:
    if part.late is not None:
        title = f"waits {print_seconds(part.met - part.start)} for worker {part.late}, {part.kind} {part.site}"
        yield Segment(part.start, part.met, WAIT, "wait", title, part.site)
    title = f"{part.kind} {part.site}: {print_seconds(part.end - part.met)}, receives {print_bytes(part.nbytes)}"
    yield Segment(part.met, part.end, EXCHANGE, part.kind, title, part.site)


def seconds_by(segments: Iterable[Segment], key: Callable[[Segment], str]) -> dict[str, float]:
    """The seconds of segments by a property of them, the most first."""
    spent: dict[str, float] = {}
    for segment in segments:
        spent[key(segment)] = spent.get(key(segment), 0.0) + segment.end - segment.start
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def describe_short(segments: Sequence[Segment]) -> str:
    """What segments do that are too short to be drawn one by one: how many, how long, and which take the most time."""
    spent = seconds_by(segments, lambda segment: f"{segment.name} {short_site(segment.site)}".strip())
    shown = [f"{name}: {print_seconds(seconds)}" for name, seconds in list(spent.items())[:SHORT_SHOWN]]
    if len(spent) > SHORT_SHOWN:
        shown.append(f"and {len(spent) - SHORT_SHOWN} others")
    return "\n".join([f"{count(len(segments), 'short op')}, {print_seconds(sum(spent.values()))}", *shown])


def shares_of(segments: Iterable[Segment], seconds: float) -> dict[str, float]:
    """The share of the time that a worker spends with each kind; the rest is idle."""
    spent: dict[str, float] = {}
    for segment in segments:
        spent[segment.kind] = spent.get(segment.kind, 0.0) + (segment.end - segment.start) / max(seconds, 1e-9)
    return spent | {IDLE: max(1.0 - sum(spent.values()), 0.0)}


def lines_of_program(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Seconds of all workers by line of the program and kind, or commands if only their sends are known; the most
    first."""
    used: dict[str, dict[str, float]] = {}
    for segments in segments_of(timeline).values():
        for segment in segments:
            kinds = used.setdefault(segment.site or NO_LINE, {})
            amount = 1.0 if timeline.has_send_times else segment.end - segment.start
            kinds[segment.kind] = kinds.get(segment.kind, 0.0) + amount
    return dict(sorted(used.items(), key=lambda item: -sum(item[1].values())))


def ops_of_lines(timeline: Timeline) -> Counter[str]:
    """The number of ops of all workers by line of the program."""
    return Counter(work.site or NO_LINE for work in timeline.work)


def waits_of_lines(timeline: Timeline) -> dict[str, tuple[int, float]]:
    """How often, and for how many seconds, the program waited at each of its lines; the longest first."""
    found: dict[str, tuple[int, float]] = {}
    for read in timeline.reads:
        number, seconds = found.get(read.site or NO_LINE, (0, 0.0))
        found[read.site or NO_LINE] = (number + 1, seconds + read.end - read.start)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def kinds_of_exchanges(timeline: Timeline) -> dict[str, tuple[int, int]]:
    """The number and the bytes of the exchanges of each kind."""
    found: dict[str, tuple[int, int]] = {}
    for exchange in timeline.exchanges:
        number, nbytes = found.get(exchange[0].kind, (0, 0))
        found[exchange[0].kind] = (number + 1, nbytes + sum([part.nbytes for part in exchange]))
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


COLORS = {
    CONTRACTION: "#3b6fb6",
    POINTWISE_OP: "#5aa469",
    REDUCTION_OP: "#3fb8af",
    MOVEMENT: "#a58a6f",
    CREATION_OP: "#e3c34a",
    OPTIMIZER: "#8e6bbf",
    OTHER: "#9aa3ad",
    TRANSFER: "#2f4858",
    EXCHANGE: "#f0642d",
    WAIT: "#fbd5c6",
    IDLE: "#eef1f4",
}
MEANINGS = {
    CONTRACTION: "products, convolutions",
    POINTWISE_OP: "pointwise",
    REDUCTION_OP: "reductions, norms",
    MOVEMENT: "local moves, views",
    CREATION_OP: "creation, random",
    OPTIMIZER: "optimizer lists",
    OTHER: "other",
    TRANSFER: "to and from the program",
    EXCHANGE: "exchange with workers",
    WAIT: "waits for a worker",
    IDLE: "idle",
}
STRIPES = "#e0805c"
READS = "#c9d1d9"
