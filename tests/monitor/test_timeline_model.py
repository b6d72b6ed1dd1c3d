"""What a timeline knows, from the rows of a log."""

import pytest

import gt
from gt.core.errors import SettingsError
from gt.monitor.log_rows import COLUMNS
from gt.monitor.timeline_lanes import kinds_of_exchanges, lines_of_program, segments_of, shares_of
from gt.monitor.timeline_model import read_timeline, scope_bands
from tests.monitor.timeline_logs import op, write_log


@pytest.fixture
def timeline(tmp_path):
    return read_timeline(write_log(tmp_path / "run.log"))


def test_work_is_without_the_exchanges_in_it(timeline):
    found = [(work.worker, work.kind, round(work.start, 4), round(work.end, 4)) for work in timeline.work]
    assert sorted(found) == [
        (0, "contraction", 0.0, 0.004),
        (0, "movement", 0.005, 0.006),
        (0, "pointwise", 0.004, 0.005),
        (0, "reduction", 0.014, 0.015),
        (1, "contraction", 0.001, 0.007),
        (1, "movement", 0.007, 0.008),
        (1, "other", 0.01, 0.011),
    ]
    assert (timeline.start, timeline.end, timeline.workers) == (0.0, 0.015, (0, 1))


def test_a_worker_that_comes_first_waits_for_the_other(timeline):
    (exchange,) = timeline.exchanges
    first, second = sorted(exchange)
    assert (first.start, first.met, first.end, first.late) == (0.006, 0.008, 0.01, 1)
    assert (second.met, second.late, second.nbytes) == (0.008, None, 48)
    assert kinds_of_exchanges(timeline) == {"all-gather": (1, 96)}


def test_scopes_and_reads(timeline):
    bands = [(band.worker, band.start, band.end, band.scope) for band in scope_bands(timeline.work)]
    assert sorted(bands) == [(0, 0.0, 0.005, "forward"), (0, 0.014, 0.015, "loss"), (1, 0.001, 0.007, "forward")]
    (read,) = timeline.reads
    assert (read.start, read.end, read.site) == (0.012, 0.015, "train.py:12")


def test_the_time_of_lines_and_workers_adds_up(timeline):
    lanes = segments_of(timeline)
    shares = {worker: shares_of(segments, timeline.seconds) for worker, segments in lanes.items()}
    assert all(sum(of_worker.values()) == pytest.approx(1.0) for of_worker in shares.values())
    assert shares[0]["wait"] == pytest.approx(2 / 15)
    used = lines_of_program(timeline)
    assert list(used) == ["/home/train.py:7", "/home/train.py:9"]
    total = sum(sum(kinds.values()) for kinds in used.values())
    assert total == pytest.approx(sum((1 - of_worker["idle"]) * 0.015 for of_worker in shares.values()))


def test_ends_without_starts_are_left_out(tmp_path):
    lines = write_log(tmp_path / "run.log").read_text().splitlines(keepends=True)
    (tmp_path / "run.log").write_text(lines[0] + "".join(lines[2:]))  # without the start of the first command
    assert len(read_timeline(tmp_path / "run.log").work) == 6


@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_an_instruction_log_has_the_times_of_sends(tmp_path, monkeypatch, format):
    monkeypatch.setenv("GT_INSTRUCTION_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("GT_INSTRUCTION_LOG_FORMAT", format)
    gt.init(workers=2, mode="virtual")
    x = gt.ones(8, 8, mesh=gt.mesh(2, ("x",)), placements="x, -")
    (x @ x).sum().item()
    gt.shutdown()
    timeline = read_timeline(tmp_path / "log")
    assert timeline.has_send_times and timeline.workers == (0, 1)
    assert {"aten.ones.default", "aten.mm.default"} <= {work.op for work in timeline.work}
    assert all(work.start == work.end for work in timeline.work)
    assert [part.worker for part in timeline.exchanges[0]] == [0, 1]


HEADER = "  ".join(COLUMNS) + "\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEADER, "no worker runs an op in this log of 0 rows"),
        (HEADER + "1.0  7  WORKER_SEND  client 1  WorkerRunOp  -  -  a.mm  -  -\n", "row 7: 'client 1' is no worker"),
        (
            HEADER + "".join(f"1.0  {n}  WORKER_{what}  worker 1  Exchange  -  -  send  -  peers=1:x\n"
                             for n, what in ((1, "RUN"), (2, "DONE"))),
            "row 1: peers=1:x are not workers and bytes",
        ),
    ],
)  # fmt: skip
def test_rows_that_make_no_sense_are_errors_with_their_number(tmp_path, text, problem):
    (tmp_path / "log").write_text(text)
    with pytest.raises(SettingsError, match=problem):
        read_timeline(tmp_path / "log")


def test_one_worker_without_exchanges_is_a_timeline(tmp_path):
    timeline = read_timeline(write_log(tmp_path / "log", [op(3, "aten.mm.default", 1, 2)]))
    assert (timeline.workers, timeline.exchanges) == ((3,), [])
