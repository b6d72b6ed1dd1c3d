"""Traces in Chrome's format: valid, with tracks for all roles, arrows between them, and times that fit together."""

import json

import jsonschema
import pytest
import torch

import gt
from gt.core.message_events import WorkerRan
from gt.core.messages import Ran, Swapped
from gt.monitor.chrome_trace import COLLECTIVES, COMPUTE, FIRST_CLIENT, FIRST_WORKER, SCOPES, WAITS, chrome_trace
from tests.records import own

TIMED = {"ts": {"type": "number", "minimum": 0}, "pid": {"type": "integer"}, "name": {"type": "string"}}
PHASES = {
    "X": {"dur": {"type": "number", "minimum": 0}, "tid": {"type": "integer"}, "args": {"type": "object"}, **TIMED},
    "M": {
        "name": {"enum": ["process_name", "thread_name", "process_sort_index", "thread_sort_index"]},
        "pid": {"type": "integer"},
        "tid": {"type": "integer"},
        "args": {"type": "object"},
    },
    "C": {"args": {"type": "object", "additionalProperties": {"type": "number"}}, **TIMED},
    "s": {"id": {"type": "integer"}, "tid": {"type": "integer"}, "cat": {"type": "string"}, **TIMED},
    "f": {
        "id": {"type": "integer"},
        "tid": {"type": "integer"},
        "cat": {"type": "string"},
        "bp": {"const": "e"},
        **TIMED,
    },
}
# The fields that the Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU)
# requires of each phase that GT writes; Perfetto draws no arrow with an id that is no number.
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {"properties": {"ph": {"const": phase}, **fields}, "required": ["ph", *fields]}
                    for phase, fields in PHASES.items()
                ]
            },
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
}


def slices(trace, process, thread):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, thread)]


def flows(trace):
    """The arrows of a trace: both ends by id."""
    found = {}
    for entry in trace["traceEvents"]:
        if entry["ph"] in "sf":
            found.setdefault(entry["id"], {})[entry["ph"]] = entry
    return found


def run(x):
    y = x
    for _ in range(12):
        (x.T @ x).relu()
        y = (y * 0.5).cos()
    for _ in range(12):
        y = (y * 0.5).sin()
    y.sum().item()


@pytest.fixture(
    params=[{}, {"workers": 2, "mode": "virtual"}, {"workers": 2}], ids=["embedded", "virtual", "processes"]
)
def traced(request, tmp_path, monkeypatch):
    monkeypatch.setenv("GT_CHECK_GEOMETRY", "0")  # checked ops are not replayed directly
    gt.init(**request.param)
    try:
        mesh = gt.mesh(request.param.get("workers", 1), ("x",))
        x = gt.distribute(torch.ones(8, 8), mesh, "x, -")
        for _ in range(5):  # from then on the ops are replayed in segments
            run(x)
        before = gt.debug.get_worker_stats()[0].replayed_ops
        with gt.debug.trace(tmp_path / "new" / "run.json") as trace:
            run(x)
        assert gt.debug.get_worker_stats()[0].replayed_ops > before
        assert (trace.dropped, trace.missing) == (0, ())
        yield json.loads((tmp_path / "new" / "run.json").read_text())
    finally:
        gt.shutdown()


def test_a_trace_is_valid_and_shows_all_roles(traced):
    jsonschema.validate(traced, SCHEMA)
    names = {e["args"]["name"] for e in traced["traceEvents"] if e["name"] == "process_name"}
    workers = {name for name in names if name.startswith("worker")}
    assert names - workers == {"dispatcher", "client 1"} and len(workers) in (1, 2)
    for worker in range(len(workers)):
        ops = [entry["name"] for entry in slices(traced, FIRST_WORKER + worker, COMPUTE)]
        for op in ("aten.mm.default", "aten.relu.default", "aten.cos.default", "aten.sin.default"):
            assert ops.count(op) == 12, "those of repeated runs too"
    issued = slices(traced, FIRST_CLIENT + 1, 1)
    assert {"test_chrome_trace.py" in entry["args"]["line"] for entry in issued} == {True}
    assert any(entry["name"] == "wait: FetchTensor" for entry in slices(traced, FIRST_CLIENT + 1, 2))
    counters = {e["name"] for e in traced["traceEvents"] if e["ph"] == "C"}
    assert counters == {"tensors", "queued"}


def test_arrows_lead_from_the_client_to_the_workers_and_forward_in_time(traced):
    arrows = flows(traced)
    assert all(ends.keys() == {"s", "f"} for ends in arrows.values())
    to_workers = [ends for ends in arrows.values() if ends["s"]["name"] == "op"]
    assert len(to_workers) >= 36
    for ends in to_workers:
        assert ends["s"]["pid"] == FIRST_CLIENT + 1 and ends["f"]["pid"] >= FIRST_WORKER
        assert ends["s"]["ts"] <= ends["f"]["ts"]


def exchange(worker, start, end, peer, meets=0):
    swap = Swapped(start, end, ((peer, 48),), ((peer, 48),), "all-gather")
    return WorkerRan(
        worker, Ran("redistribute", 3, "forward", start - meets, end, (swap,), 1, (own(1),), (own(2),)), ""
    )


def test_a_worker_waits_until_the_last_one_comes():
    trace = chrome_trace([exchange(0, 1_000, 9_000, peer=1), exchange(1, 6_000, 9_500, peer=0)])
    jsonschema.validate(trace, SCHEMA)
    (wait,) = slices(trace, FIRST_WORKER, WAITS)
    assert (wait["name"], wait["ts"], wait["dur"]) == ("wait for worker 1", 0.0, 5.0)
    assert slices(trace, FIRST_WORKER + 1, WAITS) == []
    collectives = [slices(trace, FIRST_WORKER + worker, COLLECTIVES)[0] for worker in (0, 1)]
    assert [(c["name"], c["ts"], c["dur"]) for c in collectives] == [("all-gather", 5.0, 3.0), ("all-gather", 5.0, 3.5)]
    assert len(flows(trace)) == 2


def test_a_worker_waits_for_the_last_of_those_it_receives_from():
    def part(worker, start, senders):
        swap = Swapped(start, 9_000, (), tuple((sender, 48) for sender in senders), "exchange")
        return WorkerRan(worker, Ran("redistribute", 3, "", start, 9_000, (swap,), 1, (own(1),), (own(2),)), "")

    trace = chrome_trace([part(0, 1_000, senders=[1]), part(1, 2_000, senders=[0]), part(2, 6_000, senders=[1])])
    (wait,) = [wait for worker in range(3) for wait in slices(trace, FIRST_WORKER + worker, WAITS)]
    assert (wait["pid"], wait["name"], wait["dur"]) == (FIRST_WORKER, "wait for worker 1", 1.0)


def test_a_command_that_runs_again_is_another_exchange():
    trace = chrome_trace([exchange(worker, at, at + 500, 1 - worker) for at in (1_000, 5_000) for worker in (0, 1)])
    assert all(slices(trace, FIRST_WORKER + worker, WAITS) == [] for worker in (0, 1))
    assert len(slices(trace, FIRST_WORKER, COLLECTIVES)) == 2 and len(flows(trace)) == 4


def test_a_command_does_not_compute_while_it_exchanges():
    trace = chrome_trace([exchange(0, 3_000, 9_000, peer=1, meets=2_000), exchange(1, 3_000, 9_000, peer=0)])
    pieces = [(piece["ts"], piece["dur"]) for piece in slices(trace, FIRST_WORKER, COMPUTE)]
    assert pieces == [(0.0, 2.0)]


def test_a_scope_is_a_band_over_its_ops():
    def op(start, scope):
        return WorkerRan(0, Ran("aten.add.Tensor", 3, scope, start, start + 500, (), 1, (), (own(start),)), "")

    trace = chrome_trace([op(1000, "forward"), op(2000, "forward"), op(3000, ""), op(4000, "loss")])
    bands = [(band["name"], band["ts"], band["dur"]) for band in slices(trace, FIRST_WORKER, SCOPES)]
    assert bands == [("forward", 0.0, 1.5), ("loss", 3.0, 0.5)]
