"""The log of a trace: messages, commands and exchanges in the order of time."""

import torch

import gt
from gt.core.message_events import WorkerRan
from gt.core.messages import Ran, Swapped
from gt.monitor.activity import MessageSeen
from gt.monitor.log_rows import read_rows
from gt.monitor.trace_log import trace_rows
from tests.records import own


def gather(worker, start, end, peer):
    swap = Swapped(start + 1_000_000, end, ((peer, 48),), ((peer, 16), (7, 32)), "all-gather")
    ran = Ran("redistribute", 3, "my scope", start, end + 1_000_000, (swap,), 1, (own(1),), (own(2),))
    return WorkerRan(worker, ran, "train.py:7")


RECORDS = [
    gather(0, 2_000_000, 9_000_000, 1),
    gather(1, 6_000_000, 9_500_000, 0),
    MessageSeen(
        1_000_000, "WORKER_SEND", "worker 0", "WorkerRunOp", -1, (own(1),), (own(2),), "redistribute", "a.py:1"
    ),
]


def test_commands_and_exchanges_have_a_start_and_an_end():
    rows = trace_rows(RECORDS)
    assert [(row.elapsed, row.seq, row.direction, row.peer, row.command) for row in rows] == [
        (0.0, 1, "WORKER_SEND", "worker 0", "WorkerRunOp"),
        (0.001, 2, "WORKER_RUN", "worker 0", "Run"),
        (0.002, 3, "WORKER_RUN", "worker 0", "Exchange"),
        (0.005, 4, "WORKER_RUN", "worker 1", "Run"),
        (0.006, 5, "WORKER_RUN", "worker 1", "Exchange"),
        (0.008, 6, "WORKER_DONE", "worker 0", "Exchange"),
        (0.0085, 7, "WORKER_DONE", "worker 1", "Exchange"),
        (0.009, 8, "WORKER_DONE", "worker 0", "Run"),
        (0.0095, 9, "WORKER_DONE", "worker 1", "Run"),
    ]


def test_an_exchange_has_its_kind_bytes_and_peers():
    rows = trace_rows(RECORDS)
    assert (rows[1].op, rows[1].ids, rows[1].site) == ("redistribute", "1->2", "train.py:7")
    assert rows[1].details == {"run": "1", "scope": "my scope"}
    assert (rows[4].op, rows[4].nbytes, rows[4].site) == ("all-gather", 48, "train.py:7")
    assert rows[4].details == {
        "run": "2", "exchange": "1", "scope": "my scope", "peers": "0:16,7:32", "sends": "0:48",
    }  # fmt: skip
    assert rows[2].details["exchange"] == "1"


def test_nothing_captured_is_no_row():
    assert trace_rows([]) == []


def test_a_program_writes_a_log_if_its_trace_is_named_so(tmp_path):
    gt.init(workers=2, mode="virtual")
    rows = {"mesh": gt.mesh(2, ("x",)), "placements": "x, -"}
    x = gt.ones(8, 8, **rows)
    with gt.debug.trace(tmp_path / "run.log"):
        (x @ x).sum().item()
    gt.shutdown()
    read = read_rows(tmp_path / "run.log")
    assert [row.seq for row in read] == list(range(1, len(read) + 1))
    assert [row.elapsed for row in read] == sorted(row.elapsed for row in read)
    started = [(row.peer, row.op) for row in read if row.direction == "WORKER_RUN" and row.command == "Run"]
    assert {("worker 0", "aten.mm.default"), ("worker 1", "aten.mm.default")} <= set(started)
    received = [row.nbytes for row in read if row.direction == "WORKER_DONE" and row.op == "all-gather"]
    assert received == [128, 128]


def commands_of(path):
    """The ops and created tensors of a log from the first upload on, without times and numbers."""
    rows = [row for row in read_rows(path) if row.command in ("WorkerCreateTensor", "WorkerRunOp")]
    first = next(n for n, row in enumerate(rows) if not row.op)
    return [(row.peer, row.command, row.ids, row.op, row.site, row.details) for row in rows[first:]]


def test_a_captured_log_has_the_rows_of_the_live_log(tmp_path, monkeypatch):
    """Tensors that ops create from nothing among them, in segments and freed in the batch that makes them too."""
    monkeypatch.setenv("GT_INSTRUCTION_LOG", str(tmp_path / "live.log"))
    gt.init(workers=2, mode="virtual")
    gt.register_config("rows", gt.SignalConfig(shard=gt.ShardConfig(axis=0, workers=[0, 1])))
    gt.synchronize()
    with gt.debug.trace(tmp_path / "captured.log"):
        x = gt.distribute(torch.ones(6, 3), gt.mesh(2, ("x",)), "x, -")
        for _ in range(12):
            gt.ones(2, 2)
            with gt.signal.context("rows"):
                y = x + gt.randn(6, 3)
            for _ in range(4):
                y = (y * 2).relu()
        y.sum().item()
    gt.shutdown()
    captured = commands_of(tmp_path / "captured.log")
    assert captured == commands_of(tmp_path / "live.log")
    created = [row for row in captured if row[1] == "WorkerCreateTensor"]
    assert {row[3] for row in created} == {"", "aten.ones.default", "aten.randn.default", "redistribute"}
    assert ("worker 1", {"shape": "6x3", "slice": "3:6,0:3", "spec": "x,-"}) in [(row[0], row[-1]) for row in created]
