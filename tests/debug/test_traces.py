"""`gt.debug.trace` where the program does something unexpected inside."""

import io

import pytest

import gt


@pytest.mark.parametrize("options", [{}, {"workers": 2, "mode": "virtual"}, {"workers": 2}])
def test_a_shutdown_inside_says_that_there_is_no_trace(tmp_path, options):
    gt.init(**options)
    reason = r"run\.json was not written: GT was shut down.*Leave the block"
    with pytest.raises(gt.SessionError, match=reason), gt.debug.trace(tmp_path / "run.json"):
        gt.shutdown()
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("name", ["file/run.json", "folder", "file/deeper/run.log"])
def test_a_path_that_cannot_be_written_is_found_before_the_block(tmp_path, embedded, name):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(gt.SettingsError, match="cannot be written"), gt.debug.trace(tmp_path / name):
        raise AssertionError("the block has begun")


def test_a_trace_that_does_not_fit_on_the_disk_leaves_no_part_of_it(tmp_path, embedded, monkeypatch):
    class FullDisk(io.FileIO):
        def write(self, data):
            super().write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("gt.monitor.chrome_trace.open_binary", lambda path: FullDisk(path, "wb"))
    with pytest.raises(gt.SettingsError, match="No space left"), gt.debug.trace(tmp_path / "run.json"):
        gt.ones(2).sum().item()
    assert list(tmp_path.iterdir()) == []
    with gt.debug.timeline() as t:  # the workers record nothing any more, and can again
        gt.ones(2).sum().item()
    assert t.events


def test_a_limit_that_is_too_large_is_none(tmp_path, embedded):
    with gt.debug.trace(tmp_path / "run.json", limit=10**30) as t:
        gt.ones(2).sum().item()
    assert t.dropped == 0 and t.path.exists()
