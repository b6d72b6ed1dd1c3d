"""`python -m gt.scripts.doctor`: finds what is wrong with a machine, and says what to do."""

import json
import os
import socket
from pathlib import Path

import pytest

from gt.monitor.attachment import RunningProgram
from gt.scripts import doctor
from tests.subprocesses import finish, start_interpreter


def findings(*options, **environment):
    code, out, err = finish(start_interpreter("-m", "gt.scripts.doctor", "--json", *options, **environment), 90)
    assert out, err
    return code, {finding["check"]: finding for finding in json.loads(out)}


def test_workers_are_started_and_their_link_is_measured():
    code, found = findings()
    assert code == 0 and "2 started in" in found["workers"]["text"]
    assert "all 2 formed a group" in found["groups"]["text"]
    assert found["links"]["text"].startswith("0 to 1 ") and found["links"]["text"].endswith("B/s")


def test_links_are_listed_with_the_slowest_first():
    links = [(1e9 * speed, (0, speed)) for speed in range(1, 10)]
    assert doctor._describe_links(links[2:0:-1]).text == "0 to 2 2 GB/s, 0 to 3 3 GB/s"
    assert doctor._describe_links(links).text.endswith("0 to 6 6 GB/s, 3 more up to 9 GB/s")
    assert doctor._describe_links([(1e6, (0, 1))]).level == "warning"


def test_what_is_wrong_has_a_remedy(tmp_path):
    (tmp_path / f"gt-monitor-{os.getuid()}").mkdir()
    (tmp_path / f"gt-monitor-{os.getuid()}").chmod(0o755)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o755)
    wrong = {"TMPDIR": str(tmp_path), "GT_KEYS": str(tmp_path / "keys"), "GT_WORKERS": "many", "PATH": "/nowhere"}
    code, found = findings("--workers", "0", **wrong)
    assert code == 1
    for check in ("settings", "temporary files", "keys"):
        assert found[check]["level"] == "bad" and found[check]["remedy"]
    assert found["compiler"]["level"] == "warning" and "g++" in found["compiler"]["remedy"]


def test_a_long_name_of_the_temporary_directory_is_told(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    _, found = findings("--workers", "0", TMPDIR=str(folder))
    assert "set TMPDIR to a shorter one" in found["temporary files"]["remedy"]


def test_one_failing_check_does_not_end_the_others(monkeypatch):
    def fail():
        raise OSError("no sensors")
        yield

    monkeypatch.setattr(doctor, "_CHECKS", (doctor._Check("sensors", fail, "buy some"), *doctor._CHECKS))
    found = {finding.check: finding for finding in doctor.examine(0)}
    assert found["sensors"] == doctor.Finding("sensors", "bad", "OSError: no sensors", "buy some")
    assert found["shared memory"].level == "good"


def test_without_memory_that_can_be_shared_there_is_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr("gt.wire.shared_memory._DIRECTORY", tmp_path / "missing")
    (finding,) = doctor._shared_memory()
    assert finding.level == "warning" and "--shm-size" in finding.remedy


def test_a_server_of_this_user_at_the_port_is_no_warning(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(doctor, "SERVER_PORT", port)
        (other,) = doctor._ports()
        assert other.level == "warning" and "-p 0" in other.remedy
        server = RunningProgram(4242, port, "python -m gt.server", Path("/nowhere"))
        monkeypatch.setattr(doctor, "running_programs", lambda: [server])
        (own,) = doctor._ports()
    assert own.level == "good" and "4242" in own.text


def test_the_table_shows_everything():
    table = doctor._table([doctor.Finding("keys", "bad", "others can enter [it]", "chmod 700")])
    assert table.row_count == 1


@pytest.mark.parametrize("count", ["-1", "many"])
def test_wrong_options_are_refused(count):
    code, _, err = finish(start_interpreter("-m", "gt.scripts.doctor", "--workers", count), 60)
    assert code == 2 and "--workers" in err
