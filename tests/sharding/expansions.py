"""An oracle for expansions: runs the calls of an expansion shard by shard in this process, with the layouts that the
planner would choose, and compares the results with torch's.

    check_expansion("aten._softmax.default", torch.randn(4, 6), 1, False, cut=["-, x"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gt.core.meta import ITEM_BYTES
from gt.core.signatures import Input
from gt.sharding.op_calls import ExpandedCall, Expansion, LocalContext, OpCall, inputs_in, with_inputs
from gt.sharding.rules import entry_of, lower, rule_of
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.spec_text import parse_spec
from gt.sharding.strategies import OpOperand, OpResult
from gt.sharding.strategy_choice import propagate_sharding
from tests.sharding.simulate import encode, flat, join, meta_of, resolve, run, split

TWO, THREE, GRID = DeviceMesh((2,), ("x",)), DeviceMesh((3,), ("x",)), DeviceMesh((2, 2), ("x", "y"))


def check_expansion(op: str, *args: Any, cut: Sequence[str], tolerance: float = 1e-5, **kwargs: Any) -> int:
    """Check an expansion on all meshes that have the axes of `cut`, the layouts of the tensor arguments. Returns the
    largest number of bytes that moved on a mesh."""
    expected = flat(resolve(op)(*args, **kwargs))
    moved = 0
    for mesh in _meshes(" ".join(cut)):
        expansion, call, tensors, specs = expansion_of(op, args, kwargs, expected, cut, mesh)
        assert expansion is not None, f"{op} does not expand for {cut}"
        found, nbytes = run_expansion(expansion, tensors, specs, mesh)
        moved = max(moved, nbytes)
        for value, whole in zip(found, expected, strict=True):
            assert (value.shape, value.dtype) == (whole.shape, whole.dtype), f"{op} gives {value.dtype} {value.shape}"
            torch.testing.assert_close(value, whole, rtol=tolerance, atol=tolerance, equal_nan=True)
    return moved


def _meshes(cut: str) -> list[DeviceMesh]:
    return [GRID] if "y" in cut else [THREE] if "[" in cut else [TWO, THREE]


def expansion_of(
    op: str, args: Any, kwargs: Any, expected: Sequence[torch.Tensor], cut: Sequence[str], mesh: DeviceMesh
) -> tuple[Expansion | None, OpCall, list[torch.Tensor], list[ShardingSpec]]:
    tensors: list[torch.Tensor] = []
    call_args = tuple([encode(value, tensors) for value in args])
    call_kwargs = {name: encode(value, tensors) for name, value in kwargs.items()}
    call = OpCall(op, call_args, call_kwargs, tuple(map(meta_of, tensors)), tuple(map(meta_of, expected)))
    specs = [parse_spec(text, mesh) for text in cut]
    assert len(specs) == len(tensors), f"{len(tensors)} tensors are laid out by {cut}"
    entry = entry_of(op)
    assert entry is not None and entry.expand is not None, f"{op} has no expansion"
    return entry.expand(call, specs), call, tensors, specs


def run_expansion(
    expansion: Expansion, tensors: Sequence[torch.Tensor], specs: Sequence[ShardingSpec], mesh: DeviceMesh
) -> tuple[list[torch.Tensor], int]:
    values, layouts, moved = list(tensors), list(specs), 0
    for expanded in expansion.calls:
        results, given, nbytes = run_call(expanded, values, layouts, mesh)
        values, layouts, moved = [*values, *results], [*layouts, *given], moved + nbytes
    return [values[position] for position in expansion.results], moved


def run_call(
    expanded: ExpandedCall, values: Sequence[torch.Tensor], layouts: Sequence[ShardingSpec], mesh: DeviceMesh
) -> tuple[list[torch.Tensor], Sequence[ShardingSpec], int]:
    """Run one call as the planner would: each tensor once among its inputs, by the cheapest strategy of its rule."""
    used = list(dict.fromkeys(value.index for value in inputs_in(expanded.args, expanded.kwargs)))
    args = tuple([with_inputs(arg, lambda value: Input(used.index(value.index))) for arg in expanded.args])
    kwargs = {name: with_inputs(arg, lambda v: Input(used.index(v.index))) for name, arg in expanded.kwargs.items()}
    tensors = [values[position] for position in used]
    call = OpCall(expanded.op, args, kwargs, tuple(map(meta_of, tensors)), expanded.outputs)
    rule = rule_of(call)
    assert rule is not None, f"{expanded.op} has no rule"
    operands = [
        OpOperand(meta.shape, ITEM_BYTES[meta.dtype], layouts[position])
        for meta, position in zip(call.inputs, used, strict=True)
    ]
    results = [OpResult(meta.shape, ITEM_BYTES[meta.dtype]) for meta in expanded.outputs]
    strategy, nbytes = propagate_sharding(rule, operands, results, mesh)
    held = [split(tensor, spec) for tensor, spec in zip(tensors, strategy.operands, strict=True)]
    local = {
        worker: run(lower(LocalContext(call, strategy.operands, strategy.results, worker)), [h[worker] for h in held])
        for worker in mesh.workers
    }
    found = []
    for position, (meta, spec) in enumerate(zip(expanded.outputs, strategy.results, strict=True)):
        told = f"{expanded.op} {expanded.args} as {strategy}"
        value = join({worker: values[position] for worker, values in local.items()}, spec, meta.shape, told)
        assert meta_of(value).dtype == meta.dtype, f"{told}: {value.dtype}, not {meta.dtype}"
        found.append(value)
    return found, strategy.results, nbytes
