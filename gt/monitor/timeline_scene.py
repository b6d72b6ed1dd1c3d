"""Lays out a timeline as a picture: a lane for each worker, coloured by the kind of its ops, arrows for exchanges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from gt.core.tables import count, print_bytes, print_seconds, short_site, ticks
from gt.monitor.timeline_lanes import (
    COLORS,
    EXCHANGE,
    IDLE,
    MEANINGS,
    READS,
    STRIPES,
    WAIT,
    Segment,
    describe_short,
    seconds_by,
    segments_of,
    shares_of,
)
from gt.monitor.timeline_margin import CodeOf, draw_margin
from gt.monitor.timeline_model import Exchanged, Timeline, scope_bands
from gt.monitor.timeline_shapes import INK, PALE, PAPER, Box, Label, Line, Scene, Shape, fitting, text_width

ARROW = "#b3390b"
SCOPES = ("#dbe7f7", "#f7e3cf", "#dcefdc", "#eadff5", "#f9dfe4", "#d9f0f0", "#f3efc8", "#e4e4e4")

LEFT, RIGHT, TOP, BOTTOM = 150.0, 330.0, 74.0, 92.0
SCOPE_HEIGHT, READ_HEIGHT, GAP = 15.0, 20.0, 34.0
BUCKET = 2.0  # what is shorter is drawn together, with the colour of what took most of the time
ARROW_BINS = 6.0  # the largest of several arrows between two workers that begin this near to each other is drawn
MAX_ARROWS_OF = 4  # workers; an exchange of more is one line through their lanes


class _Lane(NamedTuple):
    worker: int
    y: float  # top of its bar
    height: float
    segments: list[Segment]


def _no_code(site: str) -> str:
    return ""


def draw_scene(
    timeline: Timeline, name: str, width: float, height: float | None = None, code: CodeOf = _no_code
) -> Scene:
    """The picture of a timeline. The height follows from the number of workers if it is not given. `code` gives the
    text of a line of the program, empty if it is not known."""
    return _Drawing(timeline, name, width, height, code).scene()


class _Drawing:
    def __init__(self, timeline: Timeline, name: str, width: float, height: float | None, code: CodeOf) -> None:
        self._timeline, self._name, self._width, self._code = timeline, name, width, code
        self._bands = scope_bands(timeline.work)
        clients = sorted({read.client for read in timeline.reads})
        reads = len(clients) * (READ_HEIGHT + 12)
        workers = len(timeline.workers)
        strip = SCOPE_HEIGHT if self._bands else 0.0
        gap = GAP if workers <= 8 else 10.0
        if height is None:
            bar = 62.0 if workers <= 4 else 40.0 if workers <= 8 else 22.0
            height = max(TOP + reads + workers * (bar + strip + gap) + BOTTOM, 400.0)
        bar = max((height - TOP - BOTTOM - reads) / workers - strip - gap, 4.0)
        self._height = height
        self._clients = {client: TOP + at * (READ_HEIGHT + 12) for at, client in enumerate(clients)}
        self._lanes = {
            worker: _Lane(worker, TOP + reads + at * (bar + strip + gap) + strip, bar, segments)
            for at, (worker, segments) in enumerate(segments_of(timeline).items())
        }
        self._right = width - RIGHT
        self._scale = (self._right - LEFT) / max(timeline.seconds, 1e-6)

    def scene(self) -> Scene:
        shapes: list[Shape] = [
            Box(0, 0, self._width, self._height, PAPER),
            *self._header(),
            *self._axis(),
            *self._reads(),
            *self._scopes(),
        ]
        for lane in self._lanes.values():
            shapes += [*self._lane_label(lane), *self._bar(lane)]
        margin = draw_margin(self._timeline, self._right + 28, RIGHT - 48, TOP - 2, self._height, self._code)
        shapes += [*self._arrows(), *margin, *self._legend()]
        return Scene(self._width, self._height, shapes, self._name)

    def _x(self, time: float) -> float:
        return LEFT + (min(max(time, self._timeline.start), self._timeline.end) - self._timeline.start) * self._scale

    # Header, axis, legend

    def _header(self) -> Iterator[Shape]:
        timeline = self._timeline
        yield Label(20, 24, fitting(self._name, self._width - 40, 16), 16, is_bold=True)
        received = sum([part.nbytes for exchange in timeline.exchanges for part in exchange])
        facts = [
            print_seconds(timeline.seconds),
            count(len(timeline.workers), "worker"),
            count(len(timeline.work), "op"),
            count(len(timeline.exchanges), "exchange") + (f" of {print_bytes(received)}" if received else ""),
        ]
        if timeline.has_send_times:
            facts[0] = f"commands sent in {print_seconds(timeline.seconds)}"
            facts.append("an instruction log knows when commands were SENT, not when or how long they ran")
        yield Label(20, 48, " · ".join(facts), 12, PALE if not timeline.has_send_times else ARROW)

    def _axis(self) -> Iterator[Shape]:
        bottom = self._height - BOTTOM + 4
        for seconds in ticks(self._timeline.seconds):
            x = self._x(self._timeline.start + seconds)
            yield Line(x, TOP - 8, x, bottom)
            yield Label(x, bottom + 11, print_seconds(seconds), 10, PALE, "middle")

    def _legend(self) -> Iterator[Shape]:
        """The kinds that can be seen: what takes a thousandth of the time cannot."""
        spent: dict[str, float] = {} if self._timeline.has_send_times else {IDLE: self._timeline.seconds}
        for segment in [segment for lane in self._lanes.values() for segment in lane.segments]:
            least = self._timeline.seconds if self._timeline.has_send_times else 0.0
            spent[segment.kind] = spent.get(segment.kind, 0.0) + max(segment.end - segment.start, least)
        shown = [kind for kind in COLORS if kind in spent and spent[kind] >= self._timeline.seconds / 1000]
        x, y = LEFT, self._height - 44
        for kind in shown:
            text = MEANINGS[kind]
            if x + 22 + text_width(text, 11) > self._width - 20:
                x, y = LEFT, y + 22
            yield Box(x, y - 7, 14, 14, COLORS[kind], edge="#c4ccd4", hatch=STRIPES if kind == WAIT else "")
            yield Label(x + 20, y, text, 11)
            x += 36 + text_width(text, 11)

    # Lanes

    def _lane_label(self, lane: _Lane) -> Iterator[Shape]:
        middle = lane.y + lane.height / 2
        if self._timeline.has_send_times or lane.height < 26:
            yield Label(20, middle, f"worker {lane.worker}", min(lane.height + 4, 12), is_bold=True)
            return
        shares = shares_of(lane.segments, self._timeline.seconds)
        moves = shares.get(EXCHANGE, 0.0)
        waits = shares.get(WAIT, 0.0) + shares[IDLE]
        computes = max(1 - moves - waits, 0.0)
        if lane.height < 56:
            yield Label(20, middle - 8, f"worker {lane.worker}", 12, is_bold=True)
            yield Label(20, middle + 9, f"{computes:.0%} ops", 10, PALE)
            return
        yield Label(20, middle - 22, f"worker {lane.worker}", 13, is_bold=True)
        x = 20.0
        for kind, color in COLORS.items():
            width = shares.get(kind, 0.0) * 112
            title = f"{MEANINGS[kind]} {shares.get(kind, 0.0):.0%}"
            yield Box(x, middle - 10, width, 8, color, title, hatch=STRIPES if kind == WAIT else "")
            x += width
        yield Label(20, middle + 9, f"{computes:.0%} ops, {moves:.0%} exchange", 10, PALE)
        yield Label(20, middle + 23, f"{waits:.0%} waits", 10, PALE)

    def _bar(self, lane: _Lane) -> Iterator[Shape]:
        yield Box(LEFT, lane.y, self._right - LEFT, lane.height, COLORS[IDLE], edge="#d0d7de")
        if self._timeline.has_send_times:
            yield from self._marks(lane)
            return
        yield from self._buckets(lane, [segment for segment in lane.segments if not self._is_wide(segment)])
        for segment in filter(self._is_wide, lane.segments):
            yield from self._segment(lane, segment)
        yield from self._idle(lane)

    def _is_wide(self, segment: Segment) -> bool:
        return (segment.end - segment.start) * self._scale >= BUCKET

    def _segment(self, lane: _Lane, segment: Segment) -> Iterator[Shape]:
        x = self._x(segment.start)
        width = self._x(segment.end) - x
        is_wait = segment.kind == WAIT
        edge = PAPER if width > 6 else ""
        yield Box(
            x,
            lane.y,
            width,
            lane.height,
            COLORS[segment.kind],
            segment.title,
            edge=edge,
            hatch=STRIPES if is_wait else "",
        )
        name = fitting(segment.name, width - 6, 10) if lane.height >= 14 else ""
        if name and (len(name) >= min(len(segment.name), 5)):
            yield Label(x + width / 2, lane.y + lane.height / 2, name, 10, ARROW if is_wait else PAPER, "middle")

    def _buckets(self, lane: _Lane, segments: Sequence[Segment]) -> Iterator[Shape]:
        """Segments that are too short to be seen: together, as dense as they are in time."""
        buckets: dict[int, list[Segment]] = {}
        for segment in segments:
            buckets.setdefault(int((self._x(segment.start) - LEFT) / BUCKET), []).append(segment)
        looks = []
        for number, members in sorted(buckets.items()):
            times = seconds_by(members, lambda segment: segment.kind)
            density = sum(times.values()) * self._scale / BUCKET
            looks.append((number, next(iter(times)), round(min(max(density, 0.3), 1.0) * 4) / 4))
        numbered = enumerate(looks)
        for (_, kind, opacity), run in groupby(numbered, lambda look: (look[1][0] - look[0], *look[1][1:])):
            numbers = [number for _, (number, _, _) in run]
            title = describe_short([segment for number in numbers for segment in buckets[number]])
            x = LEFT + numbers[0] * BUCKET
            yield Box(x, lane.y, len(numbers) * BUCKET, lane.height, COLORS[kind], title, opacity)

    def _marks(self, lane: _Lane) -> Iterator[Shape]:
        """The times of sends: nothing is known of how long the commands took."""
        for segment in lane.segments:
            yield Box(self._x(segment.start) - 1, lane.y, 2, lane.height, COLORS[segment.kind], segment.title, 0.85)

    def _idle(self, lane: _Lane) -> Iterator[Shape]:
        """The name of gaps that are wide enough to be read."""
        last = self._timeline.start
        for segment in [*lane.segments, Segment(self._timeline.end, self._timeline.end, IDLE, "", "", "")]:
            x, width = self._x(last), self._x(segment.start) - self._x(last)
            if width > 44 and lane.height >= 14:
                text = f"idle {print_seconds(segment.start - last)}" if width > 100 else "idle"
                yield Label(x + width / 2, lane.y + lane.height / 2, text, 10, PALE, "middle")
            last = max(last, segment.end)

    def _scopes(self) -> Iterator[Shape]:
        colors = {
            scope: SCOPES[at % len(SCOPES)] for at, scope in enumerate(dict.fromkeys(b.scope for b in self._bands))
        }
        for band in self._bands:
            lane = self._lanes[band.worker]
            x, width = self._x(band.start), max(self._x(band.end) - self._x(band.start), 1.0)
            y = lane.y - SCOPE_HEIGHT
            yield Box(x, y, width, SCOPE_HEIGHT - 1, colors[band.scope], f"scope {band.scope}")
            if name := fitting(band.scope, width - 6, 9):
                yield Label(x + 4, y + SCOPE_HEIGHT / 2, name, 9)

    def _reads(self) -> Iterator[Shape]:
        for client, y in self._clients.items():
            yield Label(20, y + READ_HEIGHT / 2, f"{client} waits", 11, PALE)
            yield Line(LEFT, y + READ_HEIGHT / 2, self._right, y + READ_HEIGHT / 2)
        for read in self._timeline.reads:
            x = self._x(read.start)
            width = max(self._x(read.end) - x, 1.0)
            y = self._clients[read.client]
            title = f"{read.command} {read.site}: {print_seconds(read.end - read.start)}"
            yield Box(x, y, width, READ_HEIGHT, READS, title, edge=PAPER)
            place = short_site(read.site)
            names = (f"waits at {place}", place, f"line {place.rpartition(':')[2]}", place.rpartition(":")[2])
            if name := next((name for name in names if text_width(name, 10) <= width - 8), ""):
                yield Label(x + width / 2, y + READ_HEIGHT / 2, name, 10, INK, "middle")

    # Exchanges

    def _arrows(self) -> Iterator[Shape]:
        arrows: dict[tuple[int, int, int], tuple[int, Line]] = {}
        for exchange in self._timeline.exchanges:
            if len(exchange) > MAX_ARROWS_OF or self._timeline.has_send_times:
                yield from self._connection(exchange)
                continue
            begun = {part.worker: part for part in exchange}
            for part in exchange:
                for peer, nbytes in part.receives:
                    if peer in begun and peer != part.worker:
                        line = self._arrow(begun[peer], part, nbytes)
                        key = (peer, part.worker, int(line.x2 / ARROW_BINS))
                        if key not in arrows or arrows[key][0] < nbytes:
                            arrows[key] = (nbytes, line)
        for _, line in arrows.values():
            yield line

    def _arrow(self, sender: Exchanged, receiver: Exchanged, nbytes: int) -> Line:
        """From the edge of one lane to the facing edge of the other. An exchange takes time at both ends: it is drawn
        where it begins and where it ends, at least a little slanted."""
        source, target = self._lanes[sender.worker], self._lanes[receiver.worker]
        is_down = source.y < target.y
        y1 = source.y + source.height if is_down else source.y
        y2 = target.y if is_down else target.y + target.height
        x2 = self._x(receiver.end)
        x1 = min(self._x(max(sender.start, receiver.met)), self._x(sender.end), x2 - 3)
        title = f"{receiver.kind}: worker {sender.worker} to worker {receiver.worker}, {print_bytes(nbytes)}"
        return Line(x1, y1, x2, y2, ARROW, line_width(nbytes), True, f"{title}, {receiver.site}", 0.9)

    def _connection(self, exchange: Sequence[Exchanged]) -> Iterator[Shape]:
        lanes = sorted([self._lanes[part.worker] for part in exchange], key=lambda lane: lane.y)
        if len(lanes) > 1:
            x = self._x(max(part.met for part in exchange))
            nbytes = max(part.nbytes for part in exchange)
            title = f"{exchange[0].kind} among {len(exchange)} workers, {exchange[0].site}"
            y1, y2 = lanes[0].y, lanes[-1].y + lanes[-1].height
            yield Line(x, y1, x, y2, ARROW, line_width(nbytes), False, title, 0.7)


def line_width(nbytes: int) -> float:
    return min(max(0.35 * math.log10(max(nbytes, 1)) - 0.4, 0.7), 2.4)
