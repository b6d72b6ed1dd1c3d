"""`python -m gt.scripts.doctor`: finds what is wrong with a machine, and says what to do."""

import json
import os

import pytest

from gt.scripts import doctor
from tests.subprocesses import finish, start_interpreter


def findings(*options, **environment):
    code, out, err = finish(start_interpreter("-m", "gt.scripts.doctor", "--json", *options, **environment), 90)
    assert out, err
    return code, {finding["check"]: finding for finding in json.loads(out)}


def test_workers_are_started_and_their_link_is_measured():
    code, found = findings()
    assert code == 0 and "2 started in" in found["workers"]["text"]
    assert "the slowest link is 0 to 1" in found["links"]["text"]


def test_what_is_wrong_has_a_remedy(tmp_path):
    (tmp_path / f"gt-monitor-{os.getuid()}").mkdir()
    (tmp_path / f"gt-monitor-{os.getuid()}").chmod(0o755)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o755)
    wrong = {"TMPDIR": str(tmp_path), "GT_KEYS": str(tmp_path / "keys"), "GT_WORKERS": "many", "PATH": "/nowhere"}
    code, found = findings("--workers", "0", **wrong)
    assert code == 1
    for check in ("settings", "temporary files"):
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

    monkeypatch.setattr(doctor, "_machine", fail)
    found = {finding.check: finding for finding in doctor.examine(0)}
    assert found["processor and memory"] == doctor.Finding("processor and memory", "bad", "OSError: no sensors")
    assert found["shared memory"].level == "good"


def test_the_table_shows_everything():
    table = doctor._table([doctor.Finding("keys", "bad", "others can enter [it]", "chmod 700")])
    assert table.row_count == 1


@pytest.mark.parametrize("count", ["-1", "many"])
def test_wrong_options_are_refused(count):
    code, _, err = finish(start_interpreter("-m", "gt.scripts.doctor", "--workers", count), 60)
    assert code == 2 and "--workers" in err
