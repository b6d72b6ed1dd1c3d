"""Ops that gather their inputs are logged by the client that issued them."""

import logging

import pytest
import torch

import gt


@pytest.fixture
def said(two_processes, caplog):
    caplog.set_level(logging.WARNING, "gt.sharding")
    return caplog


def test_an_op_without_a_rule_is_logged_once_a_line(said):
    x = gt.shard(torch.arange(8.0), gt.mesh(2, ("a",)))
    for _ in range(3):
        counts = torch.histc(x, bins=4)
    torch.histc(x + 1, bins=4)
    assert counts.tolist() == [2.0, 2.0, 2.0, 2.0]
    gt.synchronize()
    assert [text.partition(" (")[0] for text in said.messages] == [
        "aten.histc.default has no sharding rule for this call: its inputs are gathered and it runs whole"
    ] * 2
    assert all(f"({__file__}:" in text for text in said.messages)


def test_a_call_that_the_program_waits_for_is_logged(said):
    x = gt.shard(torch.tensor([0.0, 1.0, 2.0, 0.0]), gt.mesh(2, ("a",)))
    assert x.nonzero().tolist() == [[1], [2]]
    (text,) = said.messages
    assert "aten.nonzero.default runs whole on gathered inputs, since the program waits for its results" in text


def test_ops_on_whole_tensors_are_not_logged(said):
    x = gt.replicate(torch.arange(4.0), gt.mesh(2, ("a",)))
    assert torch.histc(x, bins=2).tolist() == [2.0, 2.0] and len(x.nonzero()) == 3
    assert gt.shard(torch.arange(4.0), gt.mesh(2, ("a",))).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert said.messages == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_products_leave_the_weights_of_experts_where_they_are(said, dtype):
    mesh, ends = gt.mesh(2, ("a",)), torch.tensor([2, 5, 5, 8], dtype=torch.int32)
    tokens, weights = torch.randn(8, 8).to(dtype), torch.randn(4, 8, 16).to(dtype)
    experts, rows, offsets = gt.shard(weights, mesh), gt.replicate(tokens, mesh), gt.replicate(ends, mesh)
    with gt.debug.comm() as moved:
        found = torch._grouped_mm(rows, experts, offsets)
    assert moved.bytes == 0
    torch.testing.assert_close(found.cpu(), torch._grouped_mm(tokens, weights, ends))
    assert said.messages == []
