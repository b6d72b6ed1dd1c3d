"""The table of GT_DEBUG_WORKER: the commands of workers, with what they moved and hold."""

import logging

import pytest
import torch

import gt
from gt.core.tables import COMMANDS, WIDTH


@pytest.fixture
def rows(caplog):
    """The rows of two virtual workers, as (worker, the other cells)."""
    caplog.set_level(logging.DEBUG, COMMANDS)
    gt.init(workers=2, mode="virtual")

    def read():
        lines = [line for each in caplog.records for line in each.message.split("\n")]
        assert all(len(line) <= WIDTH for line in lines)
        return [(int(line[5]), *line.split()[2:]) for line in lines if line.startswith("work")]

    yield read
    gt.shutdown()


def test_a_command_has_the_shapes_of_the_worker_and_its_exchanges(rows):
    x = gt.distribute(torch.ones(6, 4), gt.mesh(2, ("x",)), "x, -")
    assert x.sum(0).relu().sum().item() == 24
    found = [row for row in rows() if row[1] in ("upload", "sum.dim_IntList", "redistribute", "relu")]
    of_worker = {worker: [row[1:] for row in found if row[0] == worker] for worker in (0, 1)}
    for cells in of_worker.values():
        assert [row[0] for row in cells] == ["upload", "sum.dim_IntList", "redistribute", "relu"]
        assert cells[0][1:3] == ("->", "f32[3,4]") and cells[0][-2:] == ("48", "B")
        assert cells[1][1:4] == ("f32[3,4]", "->", "f32[4]")
        assert cells[2][5:8] == ("all-reduce", "16", "B") and int(cells[2][8]) >= 0  # received, and waited
        assert cells[1][5:8] == ("-", "-", "-")


def test_definitions_name_no_tensors_and_a_read_names_one(rows):
    x = gt.distribute(torch.ones(6, 4), gt.mesh(2, ("x",)), "x, -")
    for op in (torch.sin, torch.cos, torch.tan, torch.exp, torch.neg):  # ops are numbered from 1, as tensors are
        assert op(x).sum().isfinite().item()
    assert {row[3] for row in rows() if row[1] == "define"} == {"-"}
    assert {row[2:3] + row[4:7] for row in rows() if row[1] == "fetch"} == {("bool[]", "-", "-", "-")}


def test_a_segment_is_one_row(rows):
    x = gt.distribute(torch.ones(6, 4), gt.mesh(2, ("x",)), "x, -")
    for _ in range(8):
        y = x
        for _ in range(6):
            y = (y + 1).relu()
        y.sum().item()
    assert any(row[1:3] == ("segment", "of") for row in rows())


def test_a_failed_result_is_called_so(rows):
    x = gt.distribute(torch.ones(6, 4), gt.mesh(2, ("x",)), "x, -")
    failed = x[:, torch.tensor([9])]
    with pytest.raises(gt.OpError):
        failed.sum().item()
    assert any("failed" in row for row in rows())
