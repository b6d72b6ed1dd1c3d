"""`python -m gt.scripts.solve`: the plan of a script, as a signals file."""

import subprocess
import sys

import pytest

from gt.signals.parser import parse_config

SCRIPT = """
import torch
import gt

model = gt.to(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
example_args = (torch.randn(32, 64),)


def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    {read}
"""


def solve(tmp_path, *options, read="return loss"):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(read=read))
    command = [sys.executable, "-m", "gt.scripts.solve", str(script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_a_plan_is_written_and_progress_is_told(tmp_path):
    file = tmp_path / "plan.yaml"
    done = solve(tmp_path, "--mesh", "2x2", "--memory", "1GiB", "--out", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "gt: recording the step" in done.stderr and "compared:" in done.stderr
    assert dict(parse_config(file.read_text()).model.mesh) == {"dp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("options", "read", "code", "reason"),
    [
        (("--mesh", "1x2"), "return loss.item()", 1, "train.py:15: the value of a tensor"),
        (("--mesh", "two"), "return loss", 2, "--mesh two is no shape such as 2x4"),
        (("--mesh", "1x2", "--memory", "1KB"), "return loss", 1, "no layout was found"),
        (("--mesh", "1x2", "--out", "missing/plan.yaml"), "return loss", 2, "there is no folder missing"),
        (("--mesh", "1x2"), "return loss\n\nexample_args = example_args[0]", 1, "is a Tensor; make it a tuple"),
    ],
)
def test_what_cannot_be_planned_is_told(tmp_path, options, read, code, reason):
    done = solve(tmp_path, *options, read=read)
    assert done.returncode == code and reason in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_is_missing_is_told(tmp_path):
    command = [sys.executable, "-m", "gt.scripts.solve", str(tmp_path / "missing.py"), "--mesh", "1x2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1 and done.stderr.endswith("give the path of a script that defines step()\n")
    assert "Traceback" not in done.stderr
