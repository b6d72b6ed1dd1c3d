"""Traces a unit on tensors without memory: its ops as a graph, and how its live tensors follow from the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from gt.worker.bound_ops import BoundOp
from gt.worker.compilation.compile_units import CompileUnit, Output, UnitCall
from gt.worker.compilation.dynamic_scalars import DYNAMIC_FORMS, DynamicScalar, has_dynamic_scalars
from gt.worker.compilation.inductor_private import fake_mode, trace_function
from gt.worker.engines.default_dtype import WithDefaultDtype, without_default_dtype
from gt.worker.engines.pytorch_engine import PyTorchEngine
from gt.worker.engines.torch_private import storage_identity

Graph: TypeAlias = torch.fx.GraphModule


class UntraceableCall(Exception):
    """Raised for the call of a unit that cannot be traced."""

    def __init__(self, call: int, reason: str) -> None:
        super().__init__(reason)
        self.call = call


class TracedUnit(NamedTuple):
    """A unit as a graph, and the fields of `Compiled` that follow from it. `inputs` are tensors without memory."""

    graph: Graph
    inputs: list[torch.Tensor]
    takes: tuple[int, ...]
    writes: tuple[int, ...]
    outputs: tuple[Output, ...]


class TracingEngine(PyTorchEngine):
    """The engine of the CPU for tensors without memory, with dynamic forms for numbers that are not constants."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def aliases(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        return storage_identity(view) == storage_identity(base)

    def shortcut(self, op: str, values: Sequence[torch.Tensor], scalars: Any = ()) -> Callable[..., Any]:
        return self.resolve(op)

    def resolve(self, op: str) -> Callable[..., Any]:
        plain = without_default_dtype(super().resolve(op))
        form = DYNAMIC_FORMS.get(op, plain)

        def run(*args: Any, **kwargs: Any) -> Any:
            return form(*args, **kwargs) if has_dynamic_scalars((*args, *kwargs.values())) else plain(*args, **kwargs)

        return WithDefaultDtype(run, torch.float32)


def trace(unit: CompileUnit) -> TracedUnit:
    """The graph of a unit. Raises UntraceableCall."""
    engine = TracingEngine()
    run = _TracedRun(engine, unit)
    with fake_mode(), torch.no_grad():
        inputs = [engine.empty(meta) for meta in unit.inputs]
        takes = run.takes
        given = [inputs[position] for position in takes]
        if run.dynamic_count:
            given.insert(0, torch.empty(run.dynamic_count, dtype=torch.float64))
        graph = trace_function(run, given)
    return TracedUnit(graph, given, takes, run.writes, run.outputs)


class _TracedRun:
    """A unit as a function of tensors. A call notes which inputs it writes, and the `outputs`."""

    def __init__(self, engine: TracingEngine, unit: CompileUnit) -> None:
        self._engine = engine
        self._unit = unit
        self._ops = [self._bind(number, call) for number, call in enumerate(unit.calls)]
        written = {call.inputs[position] for call in unit.calls for position in call.signature.writes}
        used = {register for call in unit.calls for register in call.inputs}
        self.dynamic_count = sum(scalar is None for scalar in unit.scalars)
        self.takes = tuple(register for register in range(len(unit.inputs)) if register in used)
        self.writes = tuple(register for register in self.takes if register in written)
        self.outputs: tuple[Output, ...] = ()

    def _bind(self, number: int, call: UnitCall) -> BoundOp:
        try:
            return BoundOp(self._engine, call.signature)
        except Exception as error:
            raise UntraceableCall(number, f"{call.signature.op}: {error}") from error

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scalars, tensors = self._scalars(given)
        registers: dict[int, torch.Tensor] = dict(zip(self.takes, tensors, strict=True))
        for number, (bound, call) in enumerate(zip(self._ops, self._unit.calls, strict=True)):
            try:
                self._run_call(bound, call, registers, scalars)
            except Exception as error:
                reason = f"{call.signature.op}: {type(error).__name__}: {error}"
                raise UntraceableCall(number, reason.splitlines()[0][:1000]) from error
        return self._results(registers)

    def _scalars(self, given: Sequence[torch.Tensor]) -> tuple[list[Any], Sequence[torch.Tensor]]:
        if not self.dynamic_count:
            return list(self._unit.scalars), given
        places = iter(range(self.dynamic_count))
        scalars = [DynamicScalar(given[0][next(places)]) if scalar is None else scalar for scalar in self._unit.scalars]
        return scalars, given[1:]

    def _run_call(
        self, bound: BoundOp, call: UnitCall, registers: dict[int, torch.Tensor], scalars: Sequence[Any]
    ) -> None:
        values = [registers[register] for register in call.inputs]
        results = bound.call(values, tuple(scalars[position] for position in call.scalars))
        if len(results) < len(call.outputs):
            raise RuntimeError(f"it gives {len(results)} tensors where {len(call.outputs)} were expected")
        strides = call.strides or (None,) * len(results)
        for register, result, stride in zip(call.outputs, results, strides, strict=False):
            if register >= 0:
                if not isinstance(result, torch.Tensor):
                    raise TypeError("it gives no tensor for an output")
                registers[register] = result if stride is None else self._engine.with_strides(result, stride)

    def _results(self, registers: dict[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors that the graph gives: the first one in each memory that is new and has live tensors."""
        owners: dict[int, int] = {}
        for register, tensor in registers.items():
            owners.setdefault(storage_identity(tensor), register)
        count = len(self._unit.inputs)
        owned = [owners[storage_identity(registers[register])] for register in self._unit.live]
        results = [register for register in dict.fromkeys(owned) if register >= count]
        places = {register: count + number for number, register in enumerate(results)}
        self.outputs = tuple(
            _output(registers[register], registers[owner], places.get(owner, owner))
            for register, owner in zip(self._unit.live, owned, strict=True)
        )
        return tuple(registers[register] for register in results)


def _output(tensor: torch.Tensor, owner: torch.Tensor, source: int) -> Output:
    if tensor is owner:
        return Output(source)
    offset = int(tensor.storage_offset()) - int(owner.storage_offset())
    return Output(source, (tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), offset))
