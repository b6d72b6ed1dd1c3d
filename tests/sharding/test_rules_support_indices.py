"""Indices that are out of range are refused on shards too."""

from __future__ import annotations

import pytest
import torch

from gt.sharding.op_calls import LocalContext, OpCall
from gt.sharding.rules import lower, rule_of
from gt.sharding.spec import DeviceMesh
from gt.sharding.strategies import FactorSharding, build_strategy
from tests.sharding.simulate import encode, flat, meta_of, resolve, run, split

LINE = DeviceMesh((3,), ("x",))
REFUSED = [
    ("aten.embedding.default", "v", lambda i: (torch.randn(5, 2), i)),
    ("aten.index_select.default", "d0", lambda i: (torch.randn(5, 2), 0, i)),
    ("aten.gather.default", "v", lambda i: (torch.randn(5, 2), 0, i[:, None].clone())),
    ("aten.index.Tensor", "d0", lambda i: (torch.randn(5, 2), [i])),
    ("aten.take.default", "v", lambda i: (torch.randn(5), i)),
    ("aten.index_put.default", "d0", lambda i: (torch.randn(5, 2), [i], torch.randn(2))),
    ("aten.scatter.value", "d0", lambda i: (torch.randn(5, 2), 0, i[:, None].clone(), 1.0)),
    ("aten.scatter_add.default", "d1", lambda i: (torch.randn(2, 5), 1, i[None].clone(), torch.randn(1, 3))),
    ("aten.index_add.default", "d0", lambda i: (torch.randn(5, 2), 0, i, torch.randn(3, 2))),
    ("aten.index_copy.default", "d0", lambda i: (torch.randn(5, 2), 0, i, torch.randn(3, 2))),
    ("aten.index_fill.int_Scalar", "d0", lambda i: (torch.randn(5, 2), 0, i, 1.0)),
    ("aten.put.default", "v", lambda i: (torch.randn(5), i, torch.randn(3))),
]
WRAPPING = {"aten.index.Tensor", "aten.take.default", "aten.index_put.default", "aten.index_fill.int_Scalar"}
WRAPPING |= {"aten.put.default"}


@pytest.mark.parametrize("bad", [5, 6, 100, -6, -7, -1])
@pytest.mark.parametrize(("op", "factor", "args"), REFUSED, ids=[op for op, *_ in REFUSED])
def test_an_index_in_no_shard_is_refused_by_some_worker(op, factor, args, bad):
    bad -= 5 * (op in WRAPPING and bad == -1)  # where -1 is the last element
    good, wrong = args(torch.tensor([0, 3, 4])), args(torch.tensor([0, bad, 4]))
    tensors: list[torch.Tensor] = []
    call_args = tuple([encode(value, tensors) for value in wrong])
    results = flat(resolve(op)(*good))
    call = OpCall(op, call_args, {}, tuple(map(meta_of, tensors)), tuple(map(meta_of, results)))
    rule = rule_of(call)
    strategy = build_strategy(rule, call.shapes, call.result_shapes, LINE, {factor: FactorSharding(("x",))})
    held = [split(tensor, spec) for tensor, spec in zip(tensors, strategy.operands, strict=True)]
    refused = 0
    for worker in LINE.workers:
        try:
            run(
                lower(LocalContext(call, strategy.operands, strategy.results, worker)),
                [shards[worker] for shards in held],
            )
        except (IndexError, RuntimeError):
            refused += 1
    assert refused
