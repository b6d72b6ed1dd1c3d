"""`python -m gt.scripts.trace`: attaches to real programs and servers, and leaves them as they were."""

import json
from pathlib import Path

import pytest

from gt.monitor.log_rows import read_rows
from tests.subprocesses import finish, running, serving, start

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
    assert (code, out) == (1, "") and "process 1 does not use GT; start one" in err


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
