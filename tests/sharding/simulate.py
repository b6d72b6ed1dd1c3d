"""An oracle for rules: runs an op shard by shard in this process, by every strategy of its rule, and compares the
results with torch's.

    check("aten.mm.default", torch.randn(4, 6), torch.randn(6, 5))

tries every assignment of the axes of small meshes to factors of the rule and to passthroughs of partial values, cuts
the inputs accordingly, runs the local program of each worker, joins the results and compares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch

from gt.client.storage import DTYPE_NAMES, TORCH_DTYPES
from gt.client.transfers import REDUCTIONS
from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Arg, DType, Input, ListArg, MemoryFormat, TorchLayout, WorkerDevice
from gt.sharding.boxes import box_shape
from gt.sharding.factors import WHOLE, OpShardingRule, PartialPassthrough
from gt.sharding.op_calls import LocalContext, LocalProgram, OpCall
from gt.sharding.rules import lower, rule_of
from gt.sharding.spec import DeviceMesh, ShardingSpec, local_box, local_slices
from gt.sharding.strategies import FactorSharding, OpStrategy, build_strategy

MESHES = [DeviceMesh((2,), ("x",)), DeviceMesh((3,), ("x",)), DeviceMesh((2, 2), ("x", "y"))]
MOST = 80  # strategies tried per call and mesh


def check(op: str, *args: Any, meshes: Sequence[DeviceMesh] = MESHES, tolerance: float = 1e-4, **kwargs: Any) -> int:
    """Returns the number of strategies that were tried. At least one must cut something, or the rule is useless."""
    tensors: list[torch.Tensor] = []
    call_args = tuple([encode(value, tensors) for value in args])
    call_kwargs = {name: encode(value, tensors) for name, value in kwargs.items()}
    expected = flat(resolve(op)(*args, **kwargs))
    call = OpCall(op, call_args, call_kwargs, tuple(map(meta_of, tensors)), tuple(map(meta_of, expected)))
    rule = rule_of(call)
    assert rule is not None, f"{op} has no rule for {call.shapes}"
    tried = 0
    for mesh in meshes:
        for strategy in itertools.islice(strategies(rule, call, mesh), MOST):
            compare(call, strategy, tensors, expected, tolerance)
            tried += 1
    assert tried, f"no strategy of {op} cuts anything: {rule}"
    return tried


def rule_for(op: str, *args: Any) -> OpShardingRule | None:
    tensors: list[torch.Tensor] = []
    call_args = tuple([encode(value, tensors) for value in args])
    results = flat(resolve(op)(*args))
    return rule_of(OpCall(op, call_args, {}, tuple(map(meta_of, tensors)), tuple(map(meta_of, results))))


def strategies(rule: OpShardingRule, call: OpCall, mesh: DeviceMesh) -> Iterator[OpStrategy]:
    cuttable: list[str | PartialPassthrough | None] = [
        name for name, f in rule.factors.items() if f.role != WHOLE and f.size > 0
    ]
    for chosen in itertools.product([*cuttable, *rule.passthroughs, None], repeat=len(mesh.shape)):
        axes: dict[str, tuple[str, ...]] = {}
        passing: dict[str, PartialPassthrough] = {}
        for axis, option in zip(mesh.axis_names, chosen, strict=True):
            if isinstance(option, str):
                axes[option] = (*axes.get(option, ()), axis)
            elif option is not None:
                passing[axis] = option
        assignment = {name: FactorSharding(names) for name, names in axes.items()}
        strategy = build_strategy(rule, call.shapes, call.result_shapes, mesh, assignment, passing)
        if strategy is not None and (axes or passing):
            yield strategy


def compare(
    call: OpCall,
    strategy: OpStrategy,
    tensors: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    tolerance: float,
) -> None:
    mesh = (strategy.operands or strategy.results)[0].mesh
    held = [split(tensor, spec) for tensor, spec in zip(tensors, strategy.operands, strict=True)]
    results: dict[int, list[torch.Tensor]] = {}
    for worker in mesh.workers:
        shard = LocalContext(call, strategy.operands, strategy.results, worker)
        program = lower(shard)
        results[worker] = run(program, [shards[worker] for shards in held])
    for position, (spec, whole) in enumerate(zip(strategy.results, expected, strict=True)):
        told = (
            f"{call.op} {call.shapes} {call.args} {call.kwargs}: result {position} as {spec!r} from {strategy.operands}"
        )
        found = join({w: values[position] for w, values in results.items()}, spec, tuple(whole.shape), told)
        assert found.dtype == whole.dtype, f"{told}: {found.dtype}, not {whole.dtype}"
        torch.testing.assert_close(
            found, whole, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{told}\n{m}"
        )


def split(tensor: torch.Tensor, spec: ShardingSpec) -> dict[int, torch.Tensor]:
    """The shard of each worker. Partial sums are random addends; partial values of other kinds are copies."""
    pieces = {(): tensor}
    for axis in spec.partial:
        size = spec.mesh.axis_size(axis)
        pieces = {
            (*key, position): part
            for key, value in pieces.items()
            for position, part in enumerate(addends(value, size, spec.kind))
        }
    held = {}
    for worker in spec.mesh.workers:
        coordinate = spec.mesh.coordinate(worker)
        key = tuple([coordinate[spec.mesh.axis_names.index(axis)] for axis in spec.partial])
        held[worker] = pieces[key][local_slices(spec, tuple(tensor.shape), worker)].clone()
    return held


def addends(value: torch.Tensor, count: int, kind: str) -> list[torch.Tensor]:
    if kind in ("max", "min", "and", "or"):
        return [value.clone() for _ in range(count)]
    if kind == "prod":
        return [value, *[torch.ones_like(value) for _ in range(count - 1)]]
    if value.dtype == torch.bool:
        return [value, *[torch.zeros_like(value) for _ in range(count - 1)]]
    parts = [torch.randint(-3, 4, value.shape).to(value.dtype) for _ in range(count - 1)]
    return [value - sum(parts), *parts]


def join(held: dict[int, torch.Tensor], spec: ShardingSpec, shape: tuple[int, ...], told: str) -> torch.Tensor:
    """The whole tensor, from its shards. Asserts that each shard has the shape of the spec and that replicas are
    equal."""
    first = next(iter(held.values()))
    whole: dict[tuple[int, ...], torch.Tensor] = {}
    for worker, value in held.items():
        box = local_box(spec, shape, worker)
        assert tuple(value.shape) == box_shape(box), f"{told}: worker {worker} has {tuple(value.shape)}, not {box}"
        coordinate = spec.mesh.coordinate(worker)
        key = tuple([coordinate[spec.mesh.axis_names.index(axis)] for axis in spec.partial])
        if key not in whole:
            whole[key] = torch.zeros(shape, dtype=first.dtype)
        whole[key][tuple([slice(start, stop) for start, stop in box])] = value
    for worker, value in held.items():
        coordinate = spec.mesh.coordinate(worker)
        key = tuple([coordinate[spec.mesh.axis_names.index(axis)] for axis in spec.partial])
        same = whole[key][local_slices(spec, shape, worker)]
        torch.testing.assert_close(value, same, equal_nan=True, msg=f"{told}: replicas differ at worker {worker}")
    return reduce(REDUCTIONS[spec.kind], whole.values())


def run(program: LocalProgram, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    registers: list[Any] = list(operands)
    for call in program.calls:
        args = [decode(value, registers) for value in call.args]
        kwargs = {name: decode(value, registers) for name, value in call.kwargs.items()}
        results = flat(resolve(call.op)(*args, **kwargs))
        assert len(results) == call.outputs, f"{call.op} gives {len(results)} results, not {call.outputs}"
        registers.extend(results)
    return [registers[position] for position in program.results]


def resolve(op: str) -> Any:
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def encode(value: Any, tensors: list[torch.Tensor]) -> Arg:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Input(len(tensors) - 1)
    if isinstance(value, list | tuple):
        return ListArg(tuple([encode(item, tensors) for item in value]))
    if isinstance(value, torch.dtype):
        return DType(DTYPE_NAMES[value])
    if isinstance(value, torch.device):
        return WorkerDevice()
    if isinstance(value, torch.layout):
        return TorchLayout(str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return MemoryFormat(str(value).removeprefix("torch."))
    return value


def decode(value: Arg, registers: Sequence[Any]) -> Any:
    if isinstance(value, Input):
        return registers[value.index]
    if isinstance(value, ListArg):
        return [decode(item, registers) for item in value.values]
    if isinstance(value, DType):
        return TORCH_DTYPES[value.name]
    if isinstance(value, WorkerDevice):
        return torch.device("cpu")
    if isinstance(value, TorchLayout | MemoryFormat):
        return getattr(torch, value.name)
    return value


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    shape = tuple(tensor.shape)
    return TensorMeta(shape, contiguous_strides(shape), 0, DTYPE_NAMES[tensor.dtype])


def flat(result: Any) -> list[Any]:
    """The tensors of a result, without those that are None."""
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in flat(item)]
    return [] if result is None else [result]
