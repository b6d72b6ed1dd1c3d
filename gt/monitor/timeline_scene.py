"""Lays out a timeline as a picture: a lane for each worker, coloured by the kind of its ops, arrows for exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from gt.monitor.readable_units import count, print_bytes, print_seconds, short_site, ticks
from gt.monitor.timeline_lanes import (
    EXCHANGE,
    IDLE,
    WAIT,
    Segment,
    kinds_of_exchanges,
    lines_of_program,
    segments_of,
    shares_of,
)
from gt.monitor.timeline_model import TRANSFER, Exchanged, Timeline, scope_bands
from gt.monitor.timeline_shapes import INK, PALE, PAPER, Box, Label, Line, Scene, Shape, fitting, text_width
from gt.sharding.op_kinds import CONTRACTION, CREATION_OP, MOVEMENT, OPTIMIZER, OTHER, POINTWISE_OP, REDUCTION_OP

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
ARROW = "#b3390b"
SCOPES = ("#dbe7f7", "#f7e3cf", "#dcefdc", "#eadff5", "#f9dfe4", "#d9f0f0", "#f3efc8", "#e4e4e4")

LEFT, RIGHT, TOP, BOTTOM = 150.0, 330.0, 74.0, 92.0
SCOPE_HEIGHT, READ_HEIGHT, GAP = 15.0, 20.0, 34.0
BUCKET = 2.0  # what is shorter is drawn together, with the colour of what took most of the time
ARROW_BINS = 6.0  # of several arrows between two workers that begin so near to each other, the largest is drawn
MAX_ARROWS_OF = 4  # workers; an exchange of more is one line through their lanes
TOP_LINES, LINE_HEIGHT = 9, 30.0


CodeOf: TypeAlias = Callable[[str], str]
"""The text of a line of the program, from its file and number."""


class _Lane(NamedTuple):
    worker: int
    y: float  # of its bar
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
        shapes += [*self._arrows(), *self._margin(), *self._legend()]
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
        buckets: dict[int, dict[str, float]] = {}
        for segment in segments:
            times = buckets.setdefault(int((self._x(segment.start) - LEFT) / BUCKET), {})
            times[segment.kind] = times.get(segment.kind, 0.0) + max(segment.end - segment.start, 1e-9)
        looks = []
        for number, times in sorted(buckets.items()):
            density = sum(times.values()) * self._scale / BUCKET
            kind = max(times, key=lambda kind: times[kind])
            looks.append((number, kind, round(min(max(density, 0.3), 1.0) * 4) / 4))
        numbered = enumerate(looks)
        for (_, kind, opacity), run in groupby(numbered, lambda look: (look[1][0] - look[0], *look[1][1:])):
            members = [number for _, (number, _, _) in run]
            x = LEFT + members[0] * BUCKET
            title = f"short ops, mostly {MEANINGS[kind]}"
            yield Box(x, lane.y, len(members) * BUCKET, lane.height, COLORS[kind], title, opacity)

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
            yield Box(x, y, width, READ_HEIGHT, "#c9d1d9", title, edge=PAPER)
            if name := fitting(f"waits at {short_site(read.site)}", width - 8, 10):
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

    # The margin

    def _margin(self) -> Iterator[Shape]:
        """The lines of the program that take the most time on workers, or that send most commands; and the kinds of
        exchanges, if there is room."""
        x, y, width = self._right + 28, TOP - 2, RIGHT - 48
        what = "Commands" if self._timeline.has_send_times else "Time of workers"
        yield Label(x, y, f"{what} by line", 12, is_bold=True)
        used = lines_of_program(self._timeline)
        kinds = kinds_of_exchanges(self._timeline)
        room = self._height - y - 60 - (22 + 17 * len(kinds) if kinds else 0)
        most = max(sum(spent.values()) for spent in used.values())
        visible = [(site, spent) for site, spent in used.items() if sum(spent.values()) >= most / 250]
        shown = visible[: min(TOP_LINES, max(int(room / LINE_HEIGHT), 3))]
        for site, spent in shown:
            y += LINE_HEIGHT if y > TOP else 24
            yield from self._line_of_program(x, y, width, site, spent, most)
        if len(used) > len(shown):
            yield Label(x, y + 28, f"and {count(len(used) - len(shown), 'more line')}", 10, PALE)
            y += 14
        y += 44
        if kinds and y + 17 * len(kinds) < self._height:
            yield Label(x, y, "Exchanges", 12, is_bold=True)
            for at, (kind, (number, nbytes)) in enumerate(kinds.items(), 1):
                yield Label(x, y + 2 + 17 * at, f"{number} {kind}", 10.5)
                yield Label(x + width, y + 2 + 17 * at, print_bytes(nbytes) if nbytes else "", 10.5, PALE, "end")

    def _line_of_program(
        self, x: float, y: float, width: float, site: str, spent: dict[str, float], most: float
    ) -> Iterator[Shape]:
        total = sum(spent.values())
        amount = f"{total:.0f}" if self._timeline.has_send_times else print_seconds(total)
        code = self._code(site)
        place = short_site(site)
        yield Label(x, y, fitting(f"{place.rpartition(':')[2]}: {code}" if code else place, width - 56, 10.5), 10.5)
        yield Label(x + width, y, amount, 10.5, PALE, "end")
        for kind, color in COLORS.items():
            length = spent.get(kind, 0.0) / max(most, 1e-9) * width
            if length > 0:
                title = f"{site}: {MEANINGS[kind]}"
                yield Box(x, y + 8, length, 8, color, title, hatch=STRIPES if kind == WAIT else "")
                x += length


def line_width(nbytes: int) -> float:
    return min(max(0.35 * math.log10(max(nbytes, 1)) - 0.4, 0.7), 2.4)
