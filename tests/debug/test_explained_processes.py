"""`gt.explain` on worker processes: of this program, and of a server."""

import io

import pytest

import gt
from tests.debug.explained_programs import PLANS, check_bytes, sharded


@pytest.mark.parametrize("plan", PLANS)
def test_no_byte_moves_unseen(tmp_path, two_processes, plan):
    check_bytes(tmp_path, plan)


def test_it_goes_together_with_timelines_traces_and_memory(tmp_path, two_processes):
    with (
        gt.debug.trace(tmp_path / "run.json"),
        gt.debug.timeline() as timeline,
        gt.explain(file=io.StringIO()) as explanation,
        gt.debug.memory() as memory,
    ):
        sharded("x, -").redistribute(placements="-, -")
    assert explanation.bytes == 96
    assert sum(count for event in timeline.events for each in event.transfers for _, count in each.receives) == 96
    assert memory.peak > 0
    assert "redistribute" in (tmp_path / "run.json").read_text()
