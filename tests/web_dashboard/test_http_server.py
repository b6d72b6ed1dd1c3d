"""A dashboard in a thread of a program: its life, its limits, and what it gives."""

import contextlib
import os
import signal
import socket
import sys
from contextlib import ExitStack

import msgspec
import psutil
import pytest

import gt
from gt.core.errors import SessionError, SettingsError
from gt.web_dashboard import app
from gt.web_dashboard.app import MAX_VIEWERS
from gt.web_dashboard.http_server import MAX_CONNECTIONS
from gt.web_dashboard.live_timeline import TimelinePart
from gt.web_dashboard.page_records import Failures, Memory, Program, Sessions, Status, Tensors, Traffic
from tests.subprocesses import finish, start, wait_until
from tests.web_dashboard.requests import ask, read, read_until, viewing

RECORDS = {
    "program": Program,
    "status": Status,
    "sessions": Sessions,
    "timeline": TimelinePart,
    "memory": Memory,
    "tensors": Tensors,
    "traffic": Traffic,
    "failures": Failures,
}


def record(board, name):
    answer = read(board, f"/api/{name}.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    return msgspec.json.decode(answer.body, type=RECORDS[name])


def test_every_record_can_be_read(anywhere):
    board = gt.dashboard()
    x = gt.ones(64, 64)
    (x @ x).sum().item()
    assert {name: record(board, name) for name in RECORDS}.keys() == RECORDS.keys()
    assert len(record(board, "status").workers) == (1 if anywhere == "embedded" else 3)
    (session,) = record(board, "sessions").sessions
    assert session.pid == os.getpid()
    assert record(board, "program").pid == os.getpid()


def test_memory_is_told_by_the_line_that_wrote_it(embedded):
    board = gt.dashboard()
    with viewing(board) as viewer:
        read_until(viewer, b"event: memory")
        x = gt.ones(256, 256)
        gt.synchronize()
        text = read_until(viewer, b"x = gt.ones(256, 256)")  # the code of the line
    assert b"test_http_server.py" in text
    assert x.shape == (256, 256)


def test_the_layouts_of_the_largest_tensors_are_told(four_workers):
    board = gt.dashboard()
    x = gt.ones(64, 32)
    gt.synchronize()
    (tensor, *_) = record(board, "tensors").tensors
    assert (tensor.shape, tensor.layout, tensor.count) == ((64, 32), str(x.spec), 1)
    assert [part.intervals[0] for part in tensor.parts] == [(0, 16), (16, 32), (32, 48), (48, 64)]


def test_traffic_is_told_by_pair_of_workers(four_workers):
    board = gt.dashboard()
    x = gt.ones(64, 32)
    gt.replicate(x, x.spec.mesh)
    pairs = {}

    def is_shown():
        """Workers show their traffic at the end of a batch, at most every 20 ms."""
        gt.ones(4, 4).sum().item()
        pairs.update({(pair.sender, pair.receiver): pair.nbytes for pair in record(board, "traffic").pairs})
        return (0, 1) in pairs and (3, 2) in pairs

    wait_until(is_shown, what="the traffic")
    assert pairs[0, 1] == pairs[3, 2] == 16 * 32 * 4


def test_a_failure_has_both_tracebacks(anywhere):
    board = gt.dashboard()
    index = gt.tensor([7])
    gone = gt.ones(3, 3)[index]
    with pytest.raises(Exception, match="index"):
        gone.sum().item()
    failures = record(board, "failures")
    (failure,) = failures.failures
    assert "test_http_server.py" in failure.line
    assert "Traceback" in failure.traceback and "out of bounds" in failure.message
    assert failures.code[0].code == "gone = gt.ones(3, 3)[index]"


@pytest.mark.filterwarnings("ignore")  # the loss of a worker is told as a warning too
def test_worker_processes_are_shown_and_their_loss():
    gt.init(workers=2)
    try:
        board = gt.dashboard()
        gt.ones(64, 64).sum().item()
        one, other = record(board, "status").workers
        assert one.pid != other.pid and os.getpid() not in (one.pid, other.pid)
        os.kill(other.pid, signal.SIGKILL)

        def is_lost():
            with contextlib.suppress(gt.GTError):
                gt.ones(64, 64).sum().item()
            return record(board, "failures").lost

        wait_until(is_lost, what="the loss")
        (lost,) = record(board, "failures").lost
        assert (lost.worker, lost.pid) == (other.worker, other.pid)
    finally:
        gt.shutdown()


def test_a_dashboard_is_one_and_ends_with_gt():
    gt.init()
    board = gt.dashboard()
    assert gt.dashboard() is board is gt.dashboard(board.port)
    assert board.url in repr(board) and board.url in board._repr_html_()
    with pytest.raises(SessionError, match="open at port"):
        gt.dashboard(1)
    with viewing(board) as viewer:
        read_until(viewer, b"event: timeline")
        gt.shutdown()
        read_until(viewer, b"event: ended")
    with pytest.raises(ConnectionRefusedError):
        ask(board.port, "/health")
    assert not board.is_open
    board.close()  # again


def test_another_dashboard_can_be_opened_after_one_was_closed(embedded):
    first = gt.dashboard()
    first.close()
    second = gt.dashboard()
    assert second is not first
    assert ask(second.port, "/health").status == 200


def test_a_port_that_is_taken_is_named(embedded):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}.*another port"):
            gt.dashboard(port)


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "prometheus_client"])
def test_without_the_extra_the_error_names_the_command(embedded, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError, match=rf"needs {package}: pip install 'gt-tensor\[dashboard\]'"):
        gt.dashboard()


def test_the_token_may_be_set(monkeypatch):
    monkeypatch.setenv("GT_DASHBOARD_TOKEN", "a-token-of-mine-for-prometheus")
    gt.init()
    try:
        assert gt.dashboard().url.endswith("/?token=a-token-of-mine-for-prometheus")
    finally:
        gt.shutdown()


def test_a_token_that_can_be_guessed_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setenv("GT_DASHBOARD_TOKEN", "secret")
    with pytest.raises(SettingsError, match="16 to 256") as error:
        gt.init()
    assert "secret" not in str(error.value)


def test_a_thread_that_serves_does_not_slow_ops_by_a_lock(embedded):
    """Threads that make no ops are not counted among those that may."""
    from gt.client import active_session  # noqa: PLC0415

    before = active_session.active.quiet_threads
    board = gt.dashboard()
    wait_until(lambda: active_session.active.quiet_threads == before + 1)
    board.close()
    assert active_session.active.quiet_threads == before


# Hostile and slow clients


def test_connections_are_bounded(embedded):
    board = gt.dashboard()
    files = psutil.Process().num_fds
    before = files()
    with ExitStack() as stack:
        own = [stack.enter_context(socket.socket()) for _ in range(3 * MAX_CONNECTIONS)]
        for each in own:
            each.settimeout(10)
            each.connect(("127.0.0.1", board.port))
        assert own[0].recv(1) == b""  # the oldest over the limit are ended
        wait_until(lambda: files() - before - len(own) <= MAX_CONNECTIONS + 2, what="the end of the others")
    wait_until(lambda: ask(board.port, "/health").status == 200, what="an answer after the flood")


@pytest.mark.parametrize("request_line", [b"", b"GET /health", b"GET /"])
def test_strangers_leave_room_for_who_has_the_token(embedded, request_line):
    """They may say nothing, ask for what needs no token, or have none; and keep their connections."""
    board = gt.dashboard()
    with ExitStack() as stack:
        viewer = stack.enter_context(viewing(board))
        read_until(viewer, b"event: timeline")
        for _ in range(MAX_CONNECTIONS + 12):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", board.port), 10))
            if request_line:
                stranger.sendall(request_line + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert stranger.recv(1) == b"H"
        assert record(board, "program").pid == os.getpid()
        read_until(viewer, b"event:")


def test_a_connection_that_says_nothing_is_ended(embedded, monkeypatch):
    monkeypatch.setattr("gt.web_dashboard.http_server.REQUEST_SECONDS", 0.1)
    board = gt.dashboard()
    with socket.create_connection(("127.0.0.1", board.port), 10) as silent:
        silent.sendall(b"GET / HT")
        assert silent.recv(1) == b""


def test_huge_headers_are_refused(embedded):
    board = gt.dashboard()
    with socket.create_connection(("127.0.0.1", board.port), 10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 15))
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert ask(board.port, "/health").status == 200


def test_several_viewers_look_at_once_and_their_number_is_bounded(embedded):
    board = gt.dashboard()
    with ExitStack() as stack:
        viewers = [stack.enter_context(viewing(board)) for _ in range(MAX_VIEWERS)]
        for viewer in viewers:
            assert b"200 OK" in read_until(viewer, b"event: timeline")
        with viewing(board) as refused:
            assert b"503" in read_until(refused, b"viewers look")


def test_a_viewer_who_reads_nothing_is_given_up(embedded, monkeypatch):
    monkeypatch.setattr(app, "STALLED_SECONDS", 0.2)
    monkeypatch.setattr(app, "PUSH_SECONDS", 0.0)
    board = gt.dashboard()
    streams = []
    monkeypatch.setattr(app.EventStream, "_news", lambda self: streams.append(self) or iter([b"x" * (1 << 20)]))
    with viewing(board):
        wait_until(lambda: streams and streams[0]._watcher.viewers == 0, what="the end of the stream")
    assert len(streams) < 50  # what was sent does not pile up
    assert ask(board.port, "/health").status == 200


def test_a_failing_dashboard_does_not_end_the_program(embedded, monkeypatch):
    board = gt.dashboard()
    monkeypatch.setattr("gt.web_dashboard.watcher.ProgramWatcher.look", lambda self: 1 / 0)
    assert read(board, "/api/status.json").status == 500
    assert gt.ones(2).sum().item() == 2


FORKING = """
import os, socket, sys, gt
board = gt.dashboard()
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(write)
    os.read(read, 1)  # until the parent has ended
    try:
        socket.create_connection(("127.0.0.1", board.port), 5)
        print("serves")
    except ConnectionRefusedError:
        print("refused")
    sys.stdout.flush()
    os._exit(0)
os.close(read)
gt.shutdown()
"""


def test_a_forked_child_does_not_serve():
    process = start("-c", FORKING)
    code, out, err = finish(process)
    assert (code, out.strip()) == (0, "refused"), err
