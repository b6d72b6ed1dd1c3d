"""The instruction log: one aligned line for each message of the dispatcher."""

import gc
import io
import re
from pathlib import Path

import msgspec
import pytest
import torch

import gt
from gt.core.errors import SettingsError
from gt.core.ids import SESSION_SHIFT, session_of
from gt.core.message_events import Event
from gt.core.messages import (
    ByteRange,
    DefineOp,
    DefineScope,
    DefineSite,
    Failed,
    Fetched,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    LocateTensor,
    OpFailed,
    Queried,
    ReadStats,
    ReadTimeline,
    ReadTraffic,
    Redistribute,
    RunOp,
    Stats,
    Synchronize,
    Synchronized,
    TimelineReport,
    Traffic,
    WorkerStats,
)
from gt.core.settings import LogSettings
from gt.monitor.log_rows import COLUMNS, InstructionLog, open_log, read_rows
from gt.sharding.spec import DeviceMesh
from tests.dispatcher_harness import OP, OP2, REQUEST, REQUEST2, A, B, C, D, DispatcherHarness, create, over, query, run
from tests.records import ADD, ANSWERS, COMMANDS, FAILURE, INSTRUCTIONS, NONZERO, REPORTS, SMALL, own, signature

TO_THE_RIGHT = {"elapsed s", "seq", "bytes"}
GOLDEN = Path(__file__).parent / "instruction_log.txt"
MESSAGES = [*INSTRUCTIONS, *COMMANDS, *REPORTS, *ANSWERS]
LONG_OP = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def converse(harness):
    """A client adds two tensors, makes requests and leaves; then a worker is lost."""
    harness.open()
    harness.tell(DefineSite(1, "train.py", 12, "step"), create(A, site=1), create(B, site=1))
    harness.define(OP, ADD)
    harness.define(OP2, NONZERO)
    harness.tell(run(OP, (A, B), (C,), site=1), FetchTensor(REQUEST, C))
    harness.report(0, Fetched(REQUEST, ByteRange("", 16)), bytes(16))
    harness.tell(query(OP2, (C,), first=D, request=REQUEST2))
    harness.report(0, Queried(REQUEST2, (SMALL,), ()))
    harness.tell(Synchronize(own(202)), FreeTensors((A, B, C, D)))
    for worker in (0, 1):
        harness.report(worker, Synchronized(own(202)))
    harness.close()
    harness.lose(1)


def converse_about_everything(harness):
    """Every instruction of a client, so that the log has every command that it makes."""
    converse(harness)
    harness.join()
    session = harness.open()

    def mine(number):
        return (session << SESSION_SHIFT) + number

    def tell(*batch):
        harness.tell(*batch, session=session)

    pair = DeviceMesh([2], ["x"], [0, 2])
    tell(DefineSite(mine(1), "train.py", 30, "step"), DefineScope(mine(2), "forward"), DefineOp(mine(3), ADD))
    tell(create(mine(4)), Redistribute(mine(4), mine(5), over("x", pair).record(), mine(1)))
    tell(RunOp(mine(3), (mine(5), mine(5)), (mine(6),), (), mine(2), mine(1)), LocateTensor(mine(7), mine(6)))
    tell(ReadTraffic(mine(8), watch=True), ReadStats(mine(9)), ReadTimeline(mine(10), limit=8))
    for worker in (0, 2):
        harness.report(worker, Traffic(mine(8), {}))
        harness.report(worker, Stats(mine(9), WorkerStats(1, 2, 3, {})))
        harness.report(worker, TimelineReport(mine(10), (), 0))
    tell(FetchTensor(mine(11), mine(6)))
    harness.lose(2)
    failure = msgspec.structs.replace(FAILURE, origin=mine(6))
    harness.report(0, OpFailed(session, failure))
    tell(FetchTensor(mine(12), mine(4)))
    harness.report(0, Failed(mine(12), failure))
    tell(FetchTensor(mine(13), mine(99)), ForgetOps((mine(3),)), Goodbye())


def logged(conversation, workers=2):
    """The lines of a conversation, the header first."""
    file = io.StringIO()
    conversation(DispatcherHarness(workers, InstructionLog(file)))
    return file.getvalue().splitlines()


def fields(lines):
    """The fields of each line by column: columns are two or more spaces apart, and an empty field is `-`."""
    return [dict(zip(COLUMNS, re.split(r"\s{2,}", line.strip()), strict=True)) for line in lines[1:]]


def misaligned(lines):
    """Lines with a column that is not aligned with the header."""
    header = lines[0]
    left = [header.index(name) for name in COLUMNS if name not in TO_THE_RIGHT]
    right = [header.index(name) + len(name) for name in COLUMNS if name in TO_THE_RIGHT]
    return [
        line
        for line in lines
        if any(line[start - 2 : start].strip() or line[start : start + 1].strip() == "" for start in left)
        or any(line[end : end + 2].strip() or line[end - 1].strip() == "" for end in right)
    ]


def test_the_header_names_the_columns_with_their_units():
    header = logged(lambda harness: None)[0]
    assert tuple(re.split(r"\s{2,}", header.strip())) == COLUMNS


def test_every_column_begins_at_the_same_place():
    lines = logged(converse)
    assert len(lines) > 20
    assert misaligned(lines) == []


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_every_message_is_a_line(message):
    file = io.StringIO()
    InstructionLog(file)(Event("RECV", "client 1", message, "", ""))
    (line,) = fields(file.getvalue().splitlines())
    assert line["command"] == message.__struct_config__.tag


def test_long_names_and_many_ids_do_not_move_the_columns():
    ids = tuple(own(number) for number in range(1_000_000, 1_000_012))

    def long(harness):
        harness.open()
        harness.tell(DefineSite(1, "train.py", 12, "step"))
        harness.create(*ids)
        harness.define(OP, signature(LONG_OP, 12, (SMALL,) * 3))
        harness.tell(run(OP, ids, (own(1_000_100), own(1_000_101), own(1_000_102)), site=1), FreeTensors(ids))

    assert misaligned(logged(long, workers=1)) == []


def test_two_hundred_workers_and_clients_do_not_move_the_columns():
    def crowd(harness):
        for _ in range(200):
            harness.open()

    assert misaligned(logged(crowd, workers=200)) == []


def test_every_direction_is_logged():
    directions = {row["direction"] for row in fields(logged(converse))}
    assert directions == {"RECV", "SEND", "WORKER_SEND", "WORKER_RECV", "CONNECT", "DISCONNECT"}


def test_lines_are_numbered_and_time_does_not_go_back():
    rows = fields(logged(converse))
    assert [int(row["seq"]) for row in rows] == list(range(1, len(rows) + 1))
    times = [float(row["elapsed s"]) for row in rows]
    assert times == sorted(times) and times[0] >= 0


@pytest.mark.parametrize(
    ("direction", "command", "peer", "ids", "op", "site"),
    [
        ("RECV", "CreateTensor", "client 1", "1", "-", "train.py:12"),
        ("WORKER_SEND", "WorkerCreateTensor", "worker 0", "1", "-", "train.py:12"),
        ("RECV", "RunOp", "client 1", "1,2->3", "aten.add.Tensor", "train.py:12"),
        ("WORKER_SEND", "WorkerDefineProgram", "worker 1", "-", "redistribute", "-"),
        ("WORKER_SEND", "WorkerRunOp", "worker 1", "2->c1", "redistribute", "train.py:12"),
        ("WORKER_SEND", "WorkerRunOp", "worker 0", "2->c1", "redistribute", "train.py:12"),
        ("WORKER_SEND", "WorkerDefineOp", "worker 0", "-", "aten.add.Tensor", "-"),
        ("WORKER_SEND", "WorkerRunOp", "worker 0", "1,c1->3", "aten.add.Tensor", "train.py:12"),
        ("WORKER_SEND", "WorkerQueryOp", "worker 0", "3", "aten.nonzero.default", "?:0"),
        ("WORKER_SEND", "WorkerFetchTensor", "worker 0", "3", "-", "?:0"),
        ("WORKER_RECV", "Fetched", "worker 0", "-", "-", "-"),
        ("SEND", "Fetched", "client 1", "-", "-", "-"),
        ("CONNECT", "-", "worker 1", "-", "-", "-"),
        ("DISCONNECT", "-", "client 1", "-", "-", "-"),
        ("DISCONNECT", "-", "worker 1", "-", "-", "-"),
    ],
)
def test_a_line_names_peer_command_ids_op_and_site(direction, command, peer, ids, op, site):
    rows = [tuple(row.values())[2:] for row in fields(logged(converse))]
    found = [(way, who, what, which, name, place) for way, who, what, _, which, name, place, _ in rows]
    assert (direction, peer, command, ids, op, site) in found


def test_the_log_equals_the_stored_one():
    """Tools of users read the log: its columns and the names in it stay. `instruction_log.txt` is rewritten by
    running this file."""
    assert timeless(logged(converse_about_everything)) == GOLDEN.read_text().splitlines()


def timeless(lines):
    """Lines without the column that differs from run to run."""
    return [line[14:] for line in lines]


def test_sizes_are_those_of_the_bytes_that_travel():
    rows = fields(logged(converse))
    assert {row["command"]: row["bytes"] for row in rows if row["bytes"] != "-"} == {
        "CreateTensor": "16",
        "WorkerCreateTensor": "16",
        "Fetched": "16",
    }


def test_ids_are_shown_without_their_session():
    assert session_of(A) == 1
    assert str(A) not in "\n".join(logged(converse))


def test_no_path_means_no_observer():
    assert open_log(LogSettings()) is None


def test_a_path_that_cannot_be_written_is_an_error(tmp_path):
    path = str(tmp_path / "missing" / "log")
    with pytest.raises(SettingsError, match=r"GT_INSTRUCTION_LOG=.* cannot be written: .*No such file"):
        open_log(LogSettings(path))


def test_a_line_is_in_the_file_as_soon_as_the_message_has_passed(tmp_path):
    path = tmp_path / "log"
    log = open_log(LogSettings(str(path)))
    harness = DispatcherHarness(1, log)
    assert len(path.read_text().splitlines()) == 2  # the header, and the worker that joined
    harness.open()
    assert "client 1" in path.read_text().splitlines()[-1]
    log._file.close()


def test_a_program_writes_the_log_that_its_environment_names(tmp_path, monkeypatch):
    path = tmp_path / "log"
    monkeypatch.setenv("GT_INSTRUCTION_LOG", str(path))
    gt.init()
    (gt.ones(2, 2) @ gt.ones(2, 2)).sum().item()
    gt.shutdown()
    gc.collect()  # an open file that is dropped is a warning, and so an error
    rows = fields(path.read_text().splitlines())
    (product,) = [row for row in rows if row["command"] == "RunOp" and row["op"] == "aten.mm.default"]
    assert "test_instruction_log.py:" in product["site"]


def test_an_unwritable_log_does_not_end_the_dispatcher(caplog, monkeypatch):
    monkeypatch.setenv("GT_INSTRUCTION_LOG", "/dev/full")
    with caplog.at_level("WARNING", "gt.dispatcher"):
        gt.init()
        assert (gt.ones(3) + 1).sum().item() == 6
        gt.shutdown()
    assert [record.message for record in caplog.records].count(
        "the instruction log /dev/full ends here: [Errno 28] No space left on device"
    ) == 1


def creations(path):
    """The peer, shape, slice and spec of each tensor that the log at `path` says was created on a worker."""
    rows = [row for row in read_rows(path) if row.command == "WorkerCreateTensor"]
    return [(row.op, row.peer, *[row.details[name] for name in ("shape", "slice", "spec")]) for row in rows]


def test_tensors_that_an_op_creates_have_a_row_for_each_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("GT_INSTRUCTION_LOG", str(tmp_path / "log"))
    gt.init(workers=2, mode="virtual")
    rows = gt.randn(4, 8, mesh=gt.mesh(2, ("x",)), placements="x, -")
    scalar = gt.zeros(())
    assert (rows.sum() + scalar).item() != 0
    gt.shutdown()
    created = creations(tmp_path / "log")
    assert [row for row in created if "4x8" in row] == [
        ("aten.randn.default", "worker 0", "4x8", "0:2,0:8", "x,-"),
        ("aten.randn.default", "worker 1", "4x8", "2:4,0:8", "x,-"),
    ]
    assert ("aten.zeros.default", "worker 0", "()", "()", "()") in created


def test_tensors_that_a_scope_moves_have_a_row_for_each_worker_that_holds_them(tmp_path, monkeypatch):
    monkeypatch.setenv("GT_INSTRUCTION_LOG", str(tmp_path / "log"))
    gt.init(workers=2, mode="virtual")
    gt.register_config("rows", gt.SignalConfig(shard=gt.ShardConfig(axis=0)))
    w = gt.to(torch.ones(4, 6))
    placed = gt.shard(torch.ones(6, 8), gt.mesh(2))
    with gt.signal.context("rows"):
        assert ((gt.ones(2, 4) @ w) @ placed).sum().item() == 2 * 4 * 6 * 8
    gt.shutdown()
    created = creations(tmp_path / "log")
    for shape in ("4x6", "6x8"):  # moved for good, and copied
        whole = f"0:{shape[0]},0:{shape[-1]}"
        moved = [(peer, part) for op, peer, found, part, _ in created if (op, found) == ("redistribute", shape)]
        assert moved == [("worker 0", whole), ("worker 1", whole)]


def test_uploads_have_the_same_details(tmp_path, monkeypatch):
    monkeypatch.setenv("GT_INSTRUCTION_LOG", str(tmp_path / "log"))
    gt.init(workers=4, mode="virtual")
    gt.distribute(torch.ones(8, 3), gt.mesh((2, 2), ("dp", "tp")), "dp tp, -").sum().item()
    gt.shutdown()
    assert creations(tmp_path / "log") == [
        ("", f"worker {worker}", "8x3", f"{2 * worker}:{2 * worker + 2},0:3", "dp/tp,-") for worker in range(4)
    ]


def test_ops_are_logged_with_the_name_of_their_scope():
    scopes = {row["details"] for row in fields(logged(converse_about_everything)) if row["command"] == "WorkerRunOp"}
    assert "scope=forward" in scopes


def test_reads_of_the_embedded_worker_are_logged(tmp_path, monkeypatch):
    """Without a log they pass no dispatcher."""
    monkeypatch.setenv("GT_INSTRUCTION_LOG", str(tmp_path / "log"))
    gt.init()
    try:
        assert gt.ones(3).sum().item() == 3.0
    finally:
        gt.shutdown()
    commands = [(row.direction, row.command) for row in read_rows(tmp_path / "log")]
    assert ("RECV", "FetchTensor") in commands and ("SEND", "Fetched") in commands


def write(path, count=40, **options):
    """Write a log of so many messages; returns the rows of all its files, the oldest first."""
    log = open_log(LogSettings(str(path), **options))
    for number in range(1, count + 1):
        log(Event("RECV", "client 1", FreeTensors((own(number),)), "", "", details=(("scope", "my scope"),)))
    log.close()
    files = sorted(path.parent.glob("*"), reverse=True)
    return [row for file in files for row in read_rows(file)]


def test_json_has_the_fields_of_the_columns(tmp_path):
    write(tmp_path / "log", format="jsonl")
    first = msgspec.json.decode((tmp_path / "log").read_text().splitlines()[0])
    assert [name.replace("_", " ") for name in first] == list(COLUMNS)
    assert first["details"] == {"scope": "my scope"} and first["bytes"] is None


@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_a_log_that_is_too_long_is_put_aside(tmp_path, format):
    rows = write(tmp_path / "log", format=format, max_bytes=1000)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["log", "log.1", "log.2", "log.3"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert [row.seq for row in rows] == list(range(rows[0].seq, 41)) and rows[0].seq > 1


def test_a_file_holds_a_line_however_small_its_limit(tmp_path):
    assert [row.seq for row in write(tmp_path / "log", max_bytes=1)] == [37, 38, 39, 40]


def test_devices_are_not_put_aside():
    log = open_log(LogSettings("/dev/null", max_bytes=1))
    for _ in range(3):
        log(Event("RECV", "client 1", Goodbye(), "", ""))
    log.close()
    assert Path("/dev/null").is_char_device() and not Path("/dev/null.1").exists()


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(timeless(logged(converse_about_everything))) + "\n")
