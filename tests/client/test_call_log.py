"""The table of GT_DEBUG_CLIENT: what a client infers anew, uploads, reads and sends."""

import logging

import pytest
import torch

import gt
from gt.core.tables import CALLS, WIDTH


@pytest.fixture
def rows(caplog):
    """The rows of a program, as their first columns."""
    caplog.set_level(logging.DEBUG, CALLS)
    gt.init()

    def read():
        lines = [line for each in caplog.records for line in each.message.split("\n") if line.startswith("call")]
        assert all(len(line) <= WIDTH for line in lines)
        return [line.split() for line in lines]

    yield read
    gt.shutdown()


def test_a_call_is_a_row_once_and_says_how_it_was_inferred(rows):
    x = gt.tensor([[1.0, 2.0], [3.0, 4.0]])
    y = gt.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])
    for _ in range(2):
        assert (x + x)[x > 2].numel() and (y + y).numel()
    inferred = [row[2:] for row in rows() if row[1] == "infer"]
    line = f"…t_call_log.py:{test_a_call_is_a_row_once_and_says_how_it_was_inferred.__code__.co_firstlineno + 4}"
    line = f"…{line[-16:]}"
    assert inferred == [
        ["add.Tensor", "f32[2,2]", "f32[2,2]", "->", "f32[2,2]", "torch", "-", line],
        ["gt.Scalar", "f32[2,2]", "->", "bool[2,2]", "torch", "-", line],
        ["index.Tensor", "f32[2,2]", "bool[2,2]", "->", "as", "computed", "a", "worker", "-", line],
        ["add.Tensor", "f32[2,3]", "f32[2,3]", "->", "f32[2,3]", "shape", "rule", "-", line],
    ]


def test_uploads_and_reads_have_their_bytes_and_batches_their_sizes(rows):
    x = gt.to(torch.ones(64, 64))
    assert x.sum().item() == 4096
    found = rows()
    assert [row[3:6] for row in found if row[1] == "upload"] == [["f32[64,64]", "-", "16.4"]]
    assert [row[3:6] for row in found if row[1] == "read"] == [["f32[]", "-", "4"]]
    assert any(row[1] == "flush" and row[4:6] == ["1", "op,"] for row in found)


def test_a_repeated_run_of_ops_is_a_segment(rows):
    x = gt.ones(4)
    for _ in range(6):
        y = x
        for _ in range(5):
            y = (y + 1).relu()
        y.sum().item()
    segments = [row for row in rows() if row[1] == "segment"]
    assert segments and segments[0][4:6] == ["ops", "from"]


def test_without_a_reader_there_is_no_log():
    gt.init()
    assert gt.ones(2)._ref.session.call_log is None
    gt.shutdown()
