"""The monitor socket: private, found by tools of the same user, and harmless to the program."""

import os
import socket
import stat
import struct
import subprocess
import tempfile
import threading

import pytest

import gt
from gt.core.errors import ProtocolError, SessionError
from gt.core.message_events import Captured, OpIssued
from gt.core.program_view import ProgramStatus, WorkerState
from gt.monitor import monitor_protocol
from gt.monitor.attachment import ask, find_program, running_programs
from gt.monitor.monitor_protocol import (
    RECORDS_AT_ONCE,
    StatusRequest,
    TraceRequest,
    receive_answers,
    send_record,
)
from gt.monitor.monitor_socket import MAX_TOOLS, MonitorSocket
from gt.wire.private_files import monitor_directory
from tests.subprocesses import wait_until

STATUS = ProgramStatus(5, 7, (WorkerState(0, "here", 8, "cpu", 0, "idle"),), ())


class Captures:
    """Captures that hold the same records always."""

    def __init__(self, count=3):
        self.limits = []
        self.ended = threading.Event()
        self.count = count

    def begin(self, limit):
        self.limits.append(limit)

    def end(self, seconds):
        self.ended.set()
        return Captured([OpIssued(1, n, "aten.add", "a.py:1", n) for n in range(self.count)], 4, (2,))


@pytest.fixture(autouse=True)
def directory(monkeypatch):
    """Not in `tmp_path`, whose name is too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="gt-test-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield monitor_directory()
        monkeypatch.undo()


@pytest.fixture
def captures():
    return Captures()


@pytest.fixture
def monitor(captures):
    monitor = MonitorSocket(captures, lambda: STATUS, 12345)
    yield monitor
    monitor.close()


def test_a_tool_finds_a_program_and_gets_its_records(monitor, captures):
    (program,) = running_programs()
    assert (program.pid, program.port) == (os.getpid(), 12345) and "python" in program.command
    assert find_program(os.getpid()) == find_program(server="localhost:12345") == program
    with pytest.raises(SessionError, match=r"192\.0\.2\.1:12345 is on another machine: run this command there"):
        find_program(server="192.0.2.1:12345")
    answers = list(ask(program, TraceRequest(0.01, 77)))
    assert [len(answer.records) for answer in answers] == [3, 0] and captures.limits == [77]
    assert (answers[-1].dropped, answers[-1].missing) == (4, (2,))


def test_a_status_is_told_once_or_until_the_tool_goes(monitor):
    (answer,) = ask(find_program(), StatusRequest())
    assert answer.status == STATUS
    answers = ask(find_program(), StatusRequest(0.01))
    assert [next(answers).status for _ in range(3)] == [STATUS] * 3
    answers.close()
    wait_until(lambda: not monitor._attached, what="the end of the answers")


def test_many_records_come_in_portions(monitor, captures):
    captures.count = 2 * RECORDS_AT_ONCE + 1
    sizes = [len(answer.records) for answer in ask(find_program(), TraceRequest(0.01, 10))]
    assert sizes == [RECORDS_AT_ONCE, RECORDS_AT_ONCE, 1, 0]


def test_a_capture_ends_when_its_tool_goes(monitor, captures):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(find_program().path))
    send_record(connection, TraceRequest(600.0, 10))
    connection.close()
    assert captures.ended.wait(10)


def test_a_capture_that_is_refused_tells_why(monitor, captures):
    def refuse(limit):
        raise SessionError("another monitor is capturing")

    captures.begin = refuse
    with pytest.raises(SessionError, match=f"process {os.getpid()} refuses: another monitor"):
        list(ask(find_program(), TraceRequest(0.01, 10)))


@pytest.mark.parametrize(
    "noise",
    [b"", b"\0", struct.pack(">I", 1 << 31), struct.pack(">I", 5) + b"hello", struct.pack(">I", 4000) + b"\xff" * 4000],
)
def test_noise_does_not_end_the_monitor(monitor, noise):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(find_program().path))
        connection.sendall(noise)
    assert len(list(ask(find_program(), TraceRequest(0.01, 10)))) == 2


def test_only_so_many_tools_are_served_at_once(monitor):
    path = str(find_program().path)
    wait_until(lambda: not monitor._attached, what="the end of the search for programs")
    connections = [socket.socket(socket.AF_UNIX) for _ in range(MAX_TOOLS)]
    try:
        for connection in connections:
            connection.connect(path)
        with socket.socket(socket.AF_UNIX) as late:
            late.settimeout(10)
            late.connect(path)
            (answer,) = receive_answers(late)
            assert "tools are attached already" in answer.reason
    finally:
        for connection in connections:
            connection.close()


def test_the_directory_is_private_and_the_socket_goes_with_the_session(monitor, directory):
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(list(directory.iterdir())) == 1
    monitor.close()
    assert not directory.exists() and running_programs() == []


@pytest.mark.parametrize("plant", ["file", "open", "link"])
def test_a_planted_directory_is_not_used(plant, directory, tmp_path, captures):
    if plant == "file":
        directory.write_text("")
    elif plant == "open":
        directory.mkdir()
        directory.chmod(0o777)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "elsewhere")
    monitor = MonitorSocket(captures, lambda: STATUS)
    with pytest.raises(SessionError, match="is not a private directory of this user"):
        running_programs()
    monitor.close()


def test_sockets_of_programs_that_were_killed_are_removed(directory):
    directory.mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(directory / "1-0-abcd.sock"))
    dead.close()
    assert running_programs() == [] and not directory.exists()


@pytest.mark.parametrize("name", ["hello.sock", "x-y-z.sock", "1-2.sock", "-1-0-ab.sock", "1-0-ab.sock.sock"])
def test_what_is_no_socket_of_a_program_is_left_alone(monitor, directory, name):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(directory / name))
        other.listen()
        assert find_program().pid == os.getpid()
        assert (directory / name).exists()
        (directory / name).unlink()


def test_a_process_of_another_user_or_none_is_told(monitor):
    with pytest.raises(SessionError, match="there is no process 4194305"):
        find_program(4194305)  # more than Linux gives
    if os.getuid() == 0:
        with subprocess.Popen(["sleep", "60"], user=65534) as process:
            try:
                with pytest.raises(SessionError, match="belongs to user 65534, who alone can look at it"):
                    find_program(process.pid)
            finally:
                process.kill()


def test_the_end_of_a_program_gives_tools_their_last_answers(monitor, captures):
    program = find_program()
    looks, capture = ask(program, StatusRequest(60), 30), ask(program, TraceRequest(60, 10), 30)
    assert not next(looks).is_last
    closing = threading.Thread(target=lambda: wait_until(lambda: captures.limits) or monitor.close())
    closing.start()
    assert [len(answer.records) for answer in capture] == [3, 0]
    assert [answer.is_last for answer in looks] == [True]
    closing.join(30)


@pytest.mark.parametrize("interval", [1e18, float("nan"), float("inf"), -1.0])
def test_an_interval_that_makes_no_sense_is_answered(monitor, interval):
    answers = ask(find_program(), StatusRequest(interval))
    if not next(answers).is_last:
        closing = threading.Thread(target=monitor.close)
        closing.start()
        assert next(answers).is_last, "the thread that answers has not failed"
        closing.join(30)


def test_without_a_program_or_with_several_the_error_says_what_to_do(monitor, captures):
    with pytest.raises(SessionError, match="process 1 does not use GT"):
        find_program(1)
    with pytest.raises(SessionError, match="no server of yours runs at localhost:7"):
        find_program(server="localhost:7")
    other = MonitorSocket(captures, lambda: STATUS)
    try:
        with pytest.raises(SessionError, match="several programs use GT; choose one with --pid"):
            find_program()
    finally:
        other.close()
    monitor.close()
    with pytest.raises(SessionError, match="no program of yours uses GT now"):
        find_program()


def test_a_fork_leaves_the_socket_of_its_parent_alone(monitor):
    child = os.fork()
    if not child:
        monitor.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(ask(find_program(), TraceRequest(0.01, 10)))) == 2


def test_a_wrong_version_is_told(monkeypatch, monitor):
    monkeypatch.setattr(monitor_protocol, "_answers", monitor_protocol.msgspec.msgpack.Decoder(int))
    with pytest.raises(ProtocolError, match="is it of another version"):
        list(ask(find_program(), TraceRequest(0.01, 10)))


def test_a_session_has_a_monitor_socket_while_it_lives():
    assert running_programs() == []
    gt.init(workers=2, mode="virtual")
    try:
        gt.ones(3)
        records = [record for answer in ask(find_program(), TraceRequest(0.01, 100)) for record in answer.records]
        assert isinstance(records, list)
    finally:
        gt.shutdown()
    assert running_programs() == []
