"""Every function of GT can be the first that a program calls."""

import pickle

import pytest
import torch

import gt
from tests.subprocesses import finish, start, start_interpreter

USES = {
    "a module": "print(gt.nn.Linear(2, 1)(gt.ones(3, 2)).shape[0])",
    "the tape": "print(gt.debug.print_tape() or 3)",
    "a tensor of another program": "import pickle; print(int(pickle.load(open({pickled!r}, 'rb')).sum().item()))",
    "a file": "print(int(torch.load({saved!r}, weights_only=False).sum().item()))",
}


@pytest.fixture
def files(embedded, tmp_path):
    x = gt.ones(3)
    (tmp_path / "pickled").write_bytes(pickle.dumps(x))
    torch.save(x, tmp_path / "saved")
    return {"pickled": str(tmp_path / "pickled"), "saved": str(tmp_path / "saved")}


@pytest.mark.parametrize("use", USES)
def test_a_first_use(use, files):
    code, out, err = finish(start("-c", f"import torch, gt; {USES[use].format(**files)}"))
    assert (code, out.split()) == (0, ["3"]), err


@pytest.mark.parametrize("arguments", ["", "workers=2, mode='virtual'", "workers=2"])
@pytest.mark.parametrize("start_of_program", ["import gt, atexit", "import torch, atexit"])
def test_a_function_of_atexit_may_read_though_it_was_registered_before_gt_started(arguments, start_of_program):
    program = f"""{start_of_program}
atexit.register(lambda: print(int(torch.nn.functional.softmax(x, 0).sum().item())))
import gt
gt.init({arguments})
import torch
x = gt.ones(2, 3)"""
    code, out, err = finish(start_interpreter("-c", program))
    assert (code, out.split(), err) == (0, ["3"], "")
