"""Every notebook of `examples/` runs, and prints what is stored in it."""

import importlib.util

import nbformat
import pytest

from tests.subprocesses import ROOT, finish, start_interpreter

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
RUNNER = ROOT / "docs" / "run_notebooks.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored_in_it(path):
    code, _, err = finish(start_interpreter(str(RUNNER), "--check", str(path)), 110)
    assert code == 0, f"{err}\nIf this is right now: make notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.get("outputs", []))


def test_another_output_is_found():
    spec = importlib.util.spec_from_file_location("run_notebooks", RUNNER)
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    stored = nbformat.read(NOTEBOOKS[0], as_version=4)
    changed = nbformat.read(NOTEBOOKS[0], as_version=4)
    cell = next(cell for cell in changed.cells if cell.get("outputs") and not cell.metadata.get("tags"))
    cell.outputs[0].text = "something else"
    assert runner.compare(stored, stored) == []
    assert "something else" in runner.compare(stored, changed)[0]
