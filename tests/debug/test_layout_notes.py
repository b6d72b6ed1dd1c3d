"""`gt.explain` names what does not lie as its parameter, and what a plan leaves whole."""

import io

import pytest
import torch
from torch import nn

import gt

PLAN = 'model: {mesh: {dp: 4}, "*weight": [dp]}\n'


@pytest.fixture(autouse=True)
def plan(four_workers, no_signals, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    gt.load_config(path)


def explained(act=lambda: None):
    with gt.explain(file=io.StringIO()) as explanation:
        act()
    return explanation


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(gt.ones(8, 8)).square().sum().backward()
    optimizer.step()
    return optimizer


def test_what_no_pattern_names_is_told_with_its_bytes():
    model = gt.to(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    explanation = explained(lambda: model(gt.ones(8, 8)))
    (note,) = explanation.notes
    assert note == "whole on each worker, as no pattern of `model` names them: 0.bias, 1.bias (64 B)"
    assert explanation.table().endswith(note)


def test_a_model_that_lies_as_the_plan_says_has_no_note():
    optimizer = trained(gt.to(nn.Linear(8, 8, bias=False)))
    assert explained(optimizer.step).notes == []


def test_states_that_lie_elsewhere_and_plain_ones_are_named():
    model = gt.to(nn.Linear(8, 8, bias=False))
    optimizer = trained(model)
    state = optimizer.state[model.weight]
    state["exp_avg"] = state["exp_avg"].redistribute(placements="-, -")
    state["extra"] = torch.ones(8, 8)
    model.weight.grad = model.weight.grad.redistribute(model.weight.spec.mesh, "-, dp")
    assert explained().notes == [
        "in this program, not on the workers of the parameter: extra of weight",
        "not laid out as the parameter: grad of weight [-, dp], exp_avg of weight [-, -]",
    ]
