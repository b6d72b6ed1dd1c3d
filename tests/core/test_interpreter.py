"""Subprocesses of GT import what the program imports, also where another user has put files of the same names."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gt.core.environment import PYTHON, import_environment
from tests.subprocesses import ROOT

STARTS = re.compile(r'sys\.executable|"-[cm]"')
PLANTED = ("gt", "torch", "msgspec", "random", "logging", "gc", "sitecustomize")
PROGRAM = """
import sys
sys.path[:] = [place for place in sys.path if place != ""]
import os
os.chdir(sys.argv[1])
import gt
gt.init(workers=2)
print(gt.ones(3).sum().item())
"""


@pytest.fixture
def trap(tmp_path):
    """A directory with modules that leave a note when they are imported."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("import os\nopen(os.path.dirname(__file__) + '/ran', 'w').close()\n")
    return tmp_path


@pytest.mark.parametrize("way", ["-c", "-m", "script"])
def test_nothing_of_the_current_directory_runs(trap, tmp_path_factory, way):
    script = tmp_path_factory.mktemp("own") / "program_of_a_test.py"
    script.write_text(PROGRAM)
    start = {"-c": ["-P", "-c", PROGRAM], "-m": ["-m", script.stem], "script": [str(script)]}[way]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), str(ROOT)])}
    run = subprocess.run(
        [sys.executable, *start, str(trap)], env=environment, cwd=script.parent, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert run.stdout == "3.0\n", run.stderr
    assert not (trap / "ran").exists()


def test_imports_are_those_of_the_program(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", ["", "lib", Path("no text"), f"{tmp_path}{os.pathsep}x", *sys.path, "lib"])
    monkeypatch.chdir(tmp_path)
    show = "import sys; print(sys.path)"
    run = subprocess.run(
        [*PYTHON, "-c", show], env={**os.environ, **import_environment()}, capture_output=True, text=True, timeout=60,
        check=True, cwd="/",
    )  # fmt: skip
    found = ast.literal_eval(run.stdout)
    assert found[:2] == [str(tmp_path), f"{tmp_path}/lib"]
    assert str(ROOT) in found and "" not in found and "/" not in found


def test_all_interpreters_that_gt_starts_are_known():
    """A new one takes PYTHON or SAFE_PATH of gt/core/environment.py."""
    files = [path for path in (ROOT / "gt").rglob("*.py") if STARTS.search(path.read_text())]
    assert sorted(str(path.relative_to(ROOT / "gt")) for path in files) == [
        "core/environment.py",
        "launch/commands.py",  # of launchers, which set SAFE_PATH
        "launch/kubernetes.py",  # in containers, with SAFE_PATH
        "launch/local_processes.py",
        "launch/slurm.py",  # -P, and the program itself
        "launch/slurm_job.py",  # the program
        "worker/compilation/server_process.py",
    ]
