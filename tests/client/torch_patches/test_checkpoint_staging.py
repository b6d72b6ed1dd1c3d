"""Asynchronous checkpoints of torch take plain copies of GT tensors when they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

import gt
from tests.subprocesses import finish, start_interpreter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PROGRAM = """
import sys
import torch
import gt
x = gt.ones(3)
assert "torch.distributed.checkpoint" not in sys.modules
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
print(StateDictStager().stage({"x": x, "plain": torch.zeros(2)}))
"""


def test_a_checkpoint_has_the_values_of_the_call(four_workers: None, tmp_path: Path) -> None:
    model = gt.to(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(gt.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "part": model.weight.detach()[1:]}
    expected = gt.to_torch(model.weight.detach())
    saved = checkpoint.async_save(state, checkpoint_id=tmp_path)
    with torch.no_grad():
        model.weight.zero_()
    saved.result(60)  # type: ignore[union-attr]
    checkpoint.load(state, checkpoint_id=tmp_path)
    assert torch.equal(gt.to_torch(state["model"]["weight"]), expected)
    assert torch.equal(gt.to_torch(state["part"]), expected[1:])


def test_copies_are_plain_and_made_once_for_each_tensor(embedded: None) -> None:
    x = gt.ones(3, requires_grad=True)
    staged = StateDictStager().stage({"a": x, "b": [x], "plain": torch.zeros(2)})
    assert type(staged["a"]) is torch.Tensor and staged["a"] is staged["b"][0]
    assert not staged["a"].requires_grad and staged["a"].tolist() == [1, 1, 1] and staged["plain"].tolist() == [0, 0]


def test_torchs_module_is_patched_when_it_is_imported_later() -> None:
    code, out, err = finish(start_interpreter("-c", PROGRAM))
    assert (code, out.splitlines()[0]) == (0, "{'x': tensor([1., 1., 1.]), 'plain': tensor([0., 0.])}"), err
