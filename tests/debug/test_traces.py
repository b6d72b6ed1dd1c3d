"""`gt.debug.trace` where the program does something unexpected inside."""

import pytest

import gt


@pytest.mark.parametrize("options", [{}, {"workers": 2, "mode": "virtual"}, {"workers": 2}])
def test_a_shutdown_inside_says_that_there_is_no_trace(tmp_path, options):
    gt.init(**options)
    reason = r"run\.json was not written: GT was shut down.*Leave the block"
    with pytest.raises(gt.SessionError, match=reason), gt.debug.trace(tmp_path / "run.json"):
        gt.shutdown()
    assert not (tmp_path / "run.json").exists()
