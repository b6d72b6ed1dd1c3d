"""Plans as rows of the table of GT_DEBUG_DISPATCHER: one line where nothing moves, more where something does."""

import logging

import pytest
import torch

import gt
from gt.core.tables import INDENT, PLANS, WIDTH
from gt.dispatcher.plan_records import record_plan
from gt.dispatcher.planner import plan_op
from gt.sharding.spec_text import parse_spec
from tests.dispatcher.plan_text import ADD, ADD_, MESH, MM, NO_RULE, RELU, SQUARE
from tests.dispatcher_harness import solo_mesh


def record(op, *layouts, copies=None):
    specs = [parse_spec(text, MESH) for text in layouts]
    metas, noted = [SQUARE] * len(specs), []
    copies = copies or [()] * len(specs)
    plan = plan_op(op, metas, specs, solo_mesh(0), copies=copies, noted=noted)
    return record_plan(op, metas, specs, copies, plan, noted, "forward", "/home/user/project/train.py:12")


def lines(found):
    return str(found).split("\n")


def test_a_plan_that_moves_nothing_is_one_line():
    (line,) = lines(record(MM, "dp, -", "-, tp"))
    assert line == (
        "plan  mm                 i k, k j -> i j | reduce(sum): k  [dp,-] [-,tp] -> [dp,tp]      0 B  forward  "
        "…ject/train.py:12"
    )


REDUCED = """
plan  relu               ... -> ...                        [dp,-+tp] -> [dp,-]         128 B  forward  …ject/train.py:12
      rule                              ... -> ...
      chosen   ...1=dp           128 B  [dp, -] -> [dp, -]
      instead  ...1=dp tp         64 B  [dp tp, -] -> [dp tp, -]                        64 B more later
      instead  ...1=dp, ...0=tp   64 B  [dp, tp] -> [dp, tp]                            64 B more later
      instead  ...0=dp           160 B  [-, dp] -> [-, dp]
      instead  ...0=dp, ...1=tp   96 B  [tp, dp] -> [tp, dp]                            64 B more later
      instead  4 more
      moves    all-reduce tp     128 B  input 0 float32[4, 4]: [dp, - + tp] -> [dp, -]
""".strip()


def test_a_plan_that_moves_shows_the_strategies_and_exchanges():
    found = record(RELU, "dp, - + tp")
    assert str(found) == REDUCED
    assert all(len(line) <= WIDTH for line in lines(found))
    assert sum(exchange.bytes for exchange in found.exchanges) == found.calls[0].chosen.bytes


def test_a_copy_is_used_and_not_moved():
    whole = parse_spec("-, -", MESH)
    assert record(NO_RULE, "dp, -", copies=[(whole,)]).exchanges == ()


@pytest.mark.parametrize(
    ("op", "layouts", "rule"),
    [
        (NO_RULE, ["dp, -"], "none: inputs are gathered"),
        (RELU, ["-, -"], "on whole tensors"),
        (ADD_, ["dp, -", "dp, -"], "..., ... -> ..."),
    ],
)
def test_the_rule_of_an_op(op, layouts, rule):
    assert record(op, *layouts).rule == rule


def test_nothing_is_noted_if_nobody_asks():
    specs = [parse_spec("dp, -", MESH), parse_spec("tp, -", MESH)]
    noted = []
    plan = plan_op(ADD, [SQUARE] * 2, specs, solo_mesh(0))
    assert plan == plan_op(ADD, [SQUARE] * 2, specs, solo_mesh(0), noted=noted) and noted


@pytest.fixture
def rows(caplog):
    """The rows of a program with two virtual workers, which is run by the test."""
    caplog.set_level(logging.DEBUG, PLANS)
    gt.init(workers=2, mode="virtual")
    yield lambda: [line for each in caplog.records for line in each.message.split("\n") if each.name == PLANS]
    gt.shutdown()


def test_each_plan_is_a_row_and_a_cached_one_is_none(rows):
    x = gt.distribute(torch.ones(4, 4), gt.mesh(2, ("x",)), "x, -")
    for _ in range(3):
        x.relu()
    gt.synchronize()
    header, row = rows()
    assert header.split()[:2] == ["op", "rule"] and row.split()[1] == "relu"
    assert row.endswith(f".py:{test_each_plan_is_a_row_and_a_cached_one_is_none.__code__.co_firstlineno + 3}")


def test_moves_and_segments_are_rows_too(rows):
    x = gt.distribute(torch.ones(4, 4), gt.mesh(2, ("x",)), "x, -")
    for _ in range(6):
        y = x
        for _ in range(10):
            y = (y + 1).relu()
        y.sum().item()
    x.redistribute(placements="-, x")
    (x @ x).sum().item()
    text = rows()
    assert any(line.startswith("plan  segment of ") for line in text)
    (moved,) = [line for line in text if line.startswith("plan  redistribute")]  # that of mm is part of its row
    assert "[x,-] -> [-,x]" in moved
    kinds = [line.split()[1] for line in text if line.startswith(f"{INDENT}moves")]
    assert kinds == ["all-to-all", "all-gather"]
