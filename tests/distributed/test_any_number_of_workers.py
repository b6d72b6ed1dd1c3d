"""One script on any number of workers: the same losses, and torch's products, which it checks itself."""

import runpy

import pytest

from tests.subprocesses import ROOT

SCRIPT = str(ROOT / "examples" / "any_number_of_workers.py")


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 20, pytest.param(200, marks=pytest.mark.slow)])
def test_the_script_runs_unchanged(workers, capsys):
    runpy.run_path(SCRIPT)["main"](workers)
    planned, layout, losses = capsys.readouterr().out.splitlines()
    assert int(planned.split()[0]) > 0 or workers == 1
    assert layout.startswith("laid out as")
    assert losses == "losses 148.59 148.57 148.54"
