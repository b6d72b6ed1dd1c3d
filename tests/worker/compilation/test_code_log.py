"""The table of GT_DEBUG_COMPILE."""

import logging

import pytest

from gt.core.tables import CODE, WIDTH
from gt.worker.compilation.code_log import note_asked, note_compiled, note_eager, note_used


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, CODE)
    return lambda: [line for each in caplog.records for line in each.message.split("\n")]


def test_a_run_of_ops_is_followed_from_the_question_to_its_gain(lines):
    ops = ["aten.add.Tensor", "aten.mul.Tensor", "aten.relu.default"]
    note_asked(ops)
    note_compiled(ops, 12.34)
    note_used(ops, 1000e-6, 400e-6)
    note_eager(ops, "its numbers change\nand so on")
    rows = [line for line in lines() if "gain" not in line]
    assert [row.split()[1] for row in rows[:4]] == ["asked", "compiled", "used", "eager"]
    assert all("3 ops from add.Tensor to relu" in row and len(row) <= WIDTH for row in rows[:4])
    assert rows[1].split()[8] == "12.3" and rows[2].split()[-4:] == ["1000", "400", "2.5", "x"]
    assert rows[4:] == ["      its numbers change", "      and so on"]
