"""The stages of docs/tuning.md, without running them."""

import dataclasses
import itertools
import re

import pytest
import torch

import gt
from benchmarks import tuning
from tests.subprocesses import ROOT


def test_each_stage_differs_from_the_one_before_in_one_thing():
    for before, after in itertools.pairwise(tuning.stages().values()):
        fields = [field.name for field in dataclasses.fields(before)]
        assert sum(getattr(before, name) is not getattr(after, name) for name in fields) == 1


def test_the_page_has_a_row_and_the_sections_of_all_stages():
    page = tuning.PAGE.read_text()
    titles = re.findall(r"^\| ([^|]+?) \|", page.partition("<!-- stages: end -->")[0], re.MULTILINE)
    assert titles[1:] == list(tuning.stages())
    assert len(re.findall(r"^## [1-9]\. ", page, re.MULTILINE)) == len(tuning.stages()) - 1


def test_both_pictures_of_the_page_are_small():
    for name in tuning.PICTURES.values():
        assert (ROOT / "docs" / "tuning" / name).stat().st_size < 200_000


@pytest.fixture
def embedded():
    gt.init()
    yield
    gt.shutdown()


def test_all_losses_are_the_same(embedded):
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 9, tuning.VOCABULARY), torch.randint(0, tuning.VOCABULARY, (4, 9))
    expected = tuning.loss_at_once(logits, labels)
    for loss in (tuning.loss_row_by_row, tuning.loss_of_uploaded_targets):
        torch.testing.assert_close(loss(logits, labels).cpu(), expected)
    tokens, padded = tuning.pad(labels, labels)
    assert tokens.shape == (4, 16)
    logits = torch.nn.functional.pad(logits, (0, 0, 0, 7))
    torch.testing.assert_close(tuning.loss_at_once(logits, padded), expected)


def test_the_optimizer_by_hand_is_torchs():
    weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
    for weight, make in zip(weights, (tuning.AdamByHand, tuning.adam), strict=True):
        optimizer = make([weight])
        for step in range(3):
            optimizer.zero_grad()
            (weight * torch.arange(3.0) - step).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(*weights)


def test_a_table_tells_the_shortest_times_and_the_gain():
    rounds = [{"ms": ms, "cpu": 7.0, "reads": reads} for ms, reads in ((40.0, 1.0), (20.0, 3.0), (30.0, 2.0))]
    assert tuning.best(rounds) == {"ms": 20.0, "cpu": 7.0, "reads": 2.0}
    *_, first, second = tuning.table({"slow": tuning.best(rounds), "fast": {"ms": 10.0, "cpu": 5.0}}).splitlines()
    assert first == "| slow | 20 | 7 |  |  |  |  | 2.0 |  |"
    assert second.startswith("| fast | 10 | 5 | 1.40 |")


@pytest.mark.parametrize("plan", sorted({program.plan for program in tuning.stages().values()}))
def test_the_plans_are_examples(plan):
    assert (tuning.PLANS / plan).exists()
