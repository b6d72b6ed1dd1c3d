"""The picture of a timeline, as shapes."""

import pytest

from gt.core.tables import count, print_bytes, print_seconds, ticks
from gt.monitor.timeline_lanes import COLORS, EXCHANGE, WAIT, Segment, describe_short
from gt.monitor.timeline_model import read_timeline
from gt.monitor.timeline_scene import ARROW, LEFT, RIGHT, draw_scene
from gt.monitor.timeline_shapes import Box, Label, Line
from tests.monitor.timeline_logs import RECORDS, gather, op, write_log

WIDTH = 1500.0


def shapes(tmp_path, kind, records=RECORDS, **options):
    scene = draw_scene(read_timeline(write_log(tmp_path / "run.log", records)), "run.log", WIDTH, **options)
    assert all(0 <= box.x <= box.x + box.width <= scene.width + 1e-6 for box in scene.shapes if isinstance(box, Box))
    return [shape for shape in scene.shapes if isinstance(shape, kind)]


def texts(tmp_path, *records, **options):
    return [label.text for label in shapes(tmp_path, Label, *records, **options)]


def test_each_worker_has_a_lane_with_the_colours_of_its_ops(tmp_path):
    bars = [box for box in shapes(tmp_path, Box) if box.height > 50 and box.width < WIDTH]
    lanes = sorted({box.y for box in bars})
    assert len(lanes) == 2
    colors = [[box.fill for box in bars if box.y == y and box.title] for y in lanes]
    by_kind = [[COLORS[kind] for kind in kinds.split()] for kinds in (
        "contraction pointwise movement wait exchange reduction", "contraction movement exchange other")]  # fmt: skip
    assert [sorted(row) for row in colors] == [sorted(row) for row in by_kind]


def test_waits_are_striped_and_gaps_are_named(tmp_path):
    assert {box.fill for box in shapes(tmp_path, Box) if box.hatch} == {COLORS[WAIT]}
    assert "idle 4 ms" in texts(tmp_path)


def test_arrows_go_from_senders_to_receivers(tmp_path):
    arrows = [line for line in shapes(tmp_path, Line) if line.has_head]
    down, up = sorted(arrows, key=lambda line: line.y1 - line.y2)
    assert down.y1 < down.y2 and up.y1 > up.y2
    assert "worker 0 to worker 1, 48 B" in down.title and "worker 1 to worker 0" in up.title


def test_an_exchange_of_many_workers_is_one_line(tmp_path):
    records = [gather(worker, 1, 5, peer=(worker + 1) % 6) for worker in range(6)]
    lines = [line for line in shapes(tmp_path, Line, records) if line.color == ARROW]
    assert len(lines) == 1 and "all-gather among 6 workers" in lines[0].title


def test_names_of_workers_scopes_lines_and_kinds_can_be_read(tmp_path):
    read = texts(tmp_path, code={"/home/train.py:7": "y = x @ w"}.get)
    assert {"worker 0", "worker 1", "forward", "products, convolutions", "7: y = x @ w", "1 all-gather"} <= {*read}
    assert "15 ms · 2 workers · 7 ops · 1 exchange of 96 B" in read
    assert "creation, random" not in read


def test_the_margin_ends_above_the_legend(tmp_path):
    kinds = [gather(worker, start, start + 1, 1 - worker, output=start, kind=f"kind{start}")
             for start in range(1, 40, 2) for worker in (0, 1)]  # fmt: skip
    labels = shapes(tmp_path, Label, [*RECORDS, *kinds])
    legend = next(label.y for label in labels if label.text == "exchange with workers")
    rows = [label.y for label in labels if "kind" in label.text or label.text.endswith(" more")]
    assert 2 < len(rows) < 20 and max(rows) < legend - 12


def test_short_ops_are_drawn_together(tmp_path):
    many = [op(0, "aten.mm.default", start / 50, start / 50 + 0.015) for start in range(5000)]
    boxes = [box for box in shapes(tmp_path, Box, many) if box.fill == COLORS["contraction"] and box.height > 50]
    assert len(boxes) < 600
    covered = sum(box.width for box in boxes)
    assert covered == pytest.approx(WIDTH - LEFT - RIGHT, rel=0.02)


def test_near_arrows_between_two_workers_are_one(tmp_path):
    times = [2 * number for number in range(500)]
    records = [gather(worker, start, start + 2, 1 - worker, output=start) for start in times for worker in (0, 1)]
    arrows = [line for line in shapes(tmp_path, Line, records) if line.has_head]
    assert 100 < len(arrows) <= 2 * (WIDTH - LEFT - RIGHT) / 6 + 2


def test_a_picture_of_send_times_says_so(tmp_path):
    log = tmp_path / "log"
    write_log(log)
    lines = [line for line in log.read_text().splitlines(keepends=True) if "WORKER_" not in line]
    lines.append("1.0  1  WORKER_SEND  worker 0  WorkerRunOp  -  ->1  aten.randn.default  train.py:3  -\n")
    log.write_text("".join(lines))
    scene = draw_scene(read_timeline(log), "log", WIDTH)
    read = " ".join(shape.text for shape in scene.shapes if isinstance(shape, Label))
    assert "knows when commands were SENT" in read and "Commands by line" in read and "idle" not in read


def test_every_kind_has_a_colour_of_its_own():
    assert len(set(COLORS.values())) == len(COLORS)
    assert EXCHANGE in COLORS


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0"), (2e-6, "2 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (2000, "2000 s")]
)
def test_seconds_are_readable(seconds, text):
    assert print_seconds(seconds) == text


def test_bytes_and_counts_are_readable():
    assert [print_bytes(n) for n in (3, 1200, 5 * 10**6, 2 * 10**9)] == ["3 B", "1.2 kB", "5 MB", "2 GB"]
    assert (count(1, "op"), count(0, "op"), count(2, "op")) == ("1 op", "0 ops", "2 ops")


@pytest.mark.parametrize("seconds", [1e-6, 0.015, 0.1, 0.99, 1.0, 7.3, 86400.0])
def test_an_axis_has_a_few_round_times(seconds):
    found = ticks(seconds)
    assert 4 <= len(found) <= 11 and found[0] == 0 and found[-1] <= seconds * (1 + 1e-9)


def test_the_margin_tells_how_many_ops_a_line_has_and_where_the_program_waits(tmp_path):
    shown = texts(tmp_path)
    place = shown.index("The program waits")
    assert shown[place + 1 : place + 3] == ["train.py:12", "1 time, 3 ms"]
    assert "5 ops, 13 ms" in shown, "of line 7"


def test_short_ops_are_told_by_what_takes_their_time():
    work = [Segment(0, at / 1000, "pointwise", "mul", "", f"/home/train.py:{at}") for at in range(1, 8)]
    assert describe_short(work).splitlines() == [
        "7 short ops, 28 ms",
        *[f"mul train.py:{at}: {at} ms" for at in (7, 6, 5, 4, 3)],
        "and 2 others",
    ]
