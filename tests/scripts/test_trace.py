"""`python -m gt.scripts.trace`: attaches to real programs and servers, and leaves them as they were."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from gt.core.errors import SessionError, SettingsError
from gt.monitor.attachment import ask, find_program
from gt.monitor.log_rows import read_rows
from gt.monitor.monitor_protocol import StatusRequest
from gt.scripts.trace import require_directory
from tests.subprocesses import finish, running, serving, start, start_interpreter

PROGRAM = """
import time
from pathlib import Path
import gt
{start}
x = gt.ones(16, 16)
print("ready", flush=True)
end = time.time() + 60
while not Path({stop!r}).exists() and time.time() < end:
    y = x
    for _ in range(20):
        y = y * 1.0001 + 0.5
    y.sum().item()
print("ended well", flush=True)
"""


def trace(*options):
    return finish(start("-m", "gt.scripts.trace", "-s", "0.3", *options), 60)


@pytest.mark.parametrize("begin", ["", "gt.init(workers=2)"], ids=["embedded", "processes"])
def test_a_running_program_is_captured_and_goes_on(tmp_path, begin):
    stop = tmp_path / "stop"
    program = start("-c", PROGRAM.format(start=begin, stop=str(stop)))
    with running(program):
        assert program.stdout.readline() == "ready\n"
        code, out, err = trace("--dir", str(tmp_path / "traces"), "--pid", str(program.pid))
        assert code == 0, err
        stop.touch()
        ended, rest, _ = finish(program, 60)
        assert ended == 0 and "ended well" in rest
    assert f"process {program.pid}" in err
    entries = json.loads(Path(out.splitlines()[0]).read_text())["traceEvents"]
    ops = {entry["name"] for entry in entries if entry["ph"] == "X"}
    assert {"aten.mul.Tensor", "aten.add.Tensor", "aten.sum.default"} <= ops
    rows = read_rows(Path(out.splitlines()[1]))
    assert ops >= {row.op for row in rows if row.direction == "WORKER_DONE"} >= {"aten.mul.Tensor"}


def test_without_a_program_it_says_so(tmp_path):
    code, out, err = trace("--pid", "1")
    assert (code, out) == (1, "") and "process 1 does not use GT, or not yet" in err


@pytest.fixture
def program(tmp_path):
    """A program that computes; it ends well when its test has ended."""
    stop = tmp_path / "stop"
    program = start("-c", PROGRAM.format(start="", stop=str(stop)))
    with running(program):
        assert program.stdout.readline() == "ready\n"
        yield program
        stop.touch()
        code, out, err = finish(program, 60)
        assert (code, out, err) == (0, "ended well\n", "")


def test_a_directory_that_cannot_be_written_to_is_found_before_the_capture(tmp_path, program):
    (tmp_path / "file").touch()
    for directory in ("/proc/nothing", "/dev/full", str(tmp_path / "file")):
        code, out, err = trace("--dir", directory, "--pid", str(program.pid))
        assert (code, out) == (1, "") and f"--dir {directory}" in err and "capturing" not in err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make links of another user")
def test_no_directory_is_made_where_a_link_of_another_user_leads(tmp_path):
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir()
    shared.chmod(0o1777)
    private.mkdir()
    (shared / "traces").symlink_to(private)
    os.lchown(shared / "traces", 65534, 65534)
    with pytest.raises(SettingsError, match="link 'traces' of user 65534"):
        require_directory(shared / "traces" / "mine")
    assert not list(private.iterdir())


def test_a_number_of_events_that_is_too_large_is_the_largest(tmp_path, program):
    code, out, err = trace("-n", "9" * 30, "--dir", str(tmp_path), "--pid", str(program.pid))
    assert (code, len(out.splitlines())) == (0, 2), err


@pytest.mark.parametrize("seconds", ["1e300", "4000", "0", "-1", "nan", "inf", "x"])
def test_seconds_that_are_no_positive_number_are_refused(seconds):
    code, out, err = finish(start("-m", "gt.scripts.trace", "-s", seconds), 60)
    assert (code, out) == (2, "") and ("number" in err or "at most" in err) and "Traceback" not in err


def begin_capture(program, directory):
    """A capture of a minute that has begun."""
    tool = start_interpreter(
        "-m", "gt.scripts.trace", "-s", "60", "--pid", str(program.pid), "--dir", str(directory), PYTHONUNBUFFERED="1"
    )
    assert "capturing 60 s" in tool.stderr.readline()
    return tool


@pytest.mark.slow
def test_an_interrupt_ends_the_capture_and_writes_it(tmp_path, program):
    tool = begin_capture(program, tmp_path / "traces")
    with running(tool):
        time.sleep(0.5)  # of the program's work
        tool.send_signal(signal.SIGINT)
        code, out, err = finish(tool, 60)
    assert code == 0, err
    ops = [row.op for row in read_rows(Path(out.splitlines()[1])) if row.direction == "WORKER_DONE"]
    assert "aten.mul.Tensor" in ops
    assert trace("--dir", str(tmp_path / "traces"), "--pid", str(program.pid))[0] == 0, "the next one can begin"


def test_a_program_that_ends_during_the_capture_gives_what_it_has(tmp_path):
    stop = tmp_path / "stop"
    program = start("-c", PROGRAM.format(start="", stop=str(stop)))
    with running(program):
        assert program.stdout.readline() == "ready\n"
        tool = begin_capture(program, tmp_path / "traces")
        with running(tool):
            time.sleep(0.5)
            stop.touch()
            assert finish(program, 60)[0] == 0
            code, out, err = finish(tool, 60)
    assert code == 0, err
    assert "aten.mul.Tensor" in Path(out.splitlines()[1]).read_text()


def test_a_stopped_program_is_named_and_goes_on_afterwards(program):
    program.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(SessionError, match=f"it is stopped; let it go on with kill -CONT {program.pid}"):
            list(ask(find_program(program.pid), StatusRequest(), patience=0.2))
    finally:
        program.send_signal(signal.SIGCONT)


def test_a_server_is_captured_with_all_its_clients(tmp_path):
    with serving(1) as port:
        begin, stop = f"gt.connect('localhost:{port}')", tmp_path / "stop"
        client = start("-c", PROGRAM.format(start=begin, stop=str(stop)))
        with running(client):
            assert client.stdout.readline() == "ready\n"
            code, out, err = trace("--server", f"localhost:{port}", "--dir", str(tmp_path / "traces"))
            assert code == 0, err
            names = [entry["name"] for entry in json.loads(Path(out.splitlines()[0]).read_text())["traceEvents"]]
            assert "aten.sum.default" in names and any(name.startswith("plan ") for name in names)


def test_the_variable_traces_a_whole_program(tmp_path):
    path = tmp_path / "run.json"
    code, _, err = finish(start("-c", "import gt; gt.ones(3).exp().sum().item()", GT_TRACE=str(path)), 60)
    assert code == 0, err
    names = {entry["name"] for entry in json.loads(path.read_text())["traceEvents"]}
    assert {"aten.ones.default", "aten.exp.default"} <= names
    program = start("-c", "import gt; print(gt.ones(3).sum().item())", GT_TRACE="/proc/nothing/run.json")
    code, out, err = finish(program, 60)
    assert (code, out) == (0, "3.0\n") and "the trace of GT_TRACE is lost" in err
    assert err.startswith("gt: the trace cannot be written to /proc/nothing/run.json")  # before it begins
