"""Compile units made of the ops that a function runs, and ways to run them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gt.client.call_template import to_wire
from gt.core.meta import TensorMeta
from gt.core.signatures import Input, ListArg, Scalar, Signature
from gt.worker.compilation.compile_server import TracedUnit, trace
from gt.worker.compilation.compile_units import Compiled, CompileUnit, UnitCall
from gt.worker.compilation.compiled_code import CompiledCode
from gt.worker.compilation.dynamic_scalars import DYNAMIC_FORMS

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler (g++)")


class Recorded(NamedTuple):
    unit: CompileUnit
    scalars: tuple[Any, ...]


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.stride(), 0, str(tensor.dtype).removeprefix("torch."))


class _Recorder(TorchDispatchMode):
    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.registers = {id(tensor): number for number, tensor in enumerate(inputs)}
        self.kept = list(inputs)
        self.count = len(inputs)
        self.calls: list[UnitCall] = []
        self.scalars: list[Any] = []
        self.constant: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if str(func).startswith(("aten.detach", "aten.alias")):
            self.registers[id(result)] = self.registers[id(args[0])]
            self.kept.append(result)
            return result
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []

        def wire(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                return Input(len(tensors) - 1)
            if type(value) is float:
                self.scalars.append(value)
                numbers.append(len(self.scalars) - 1)
                return Scalar(len(numbers) - 1)
            if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | float) for item in value):
                return ListArg(tuple(map(wire, value)))
            return to_wire(value)

        names = [argument.name for argument in func._schema.arguments]
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        wired = [wire(arg) for arg in args]
        named = {name: wire(arg) for name, arg in kwargs.items()}
        given = dict(zip(names, wired, strict=False)) | named
        writes = tuple(given[name].index for name in written if isinstance(given.get(name), Input))
        flat = list(result) if isinstance(result, list | tuple) else [result]
        fresh = [made for made in flat if isinstance(made, torch.Tensor) and not any(made is t for t in tensors)]
        positions = tuple(number for number, made in enumerate(flat) if any(made is new for new in fresh))
        inputs = tuple(self.registers[id(tensor)] for tensor in tensors)
        outputs = tuple(range(self.count, self.count + len(fresh)))
        self.count += len(fresh)
        for made, register in zip(fresh, outputs, strict=True):
            self.registers[id(made)] = register
            self.kept.append(made)
        signature = Signature(
            str(func), tuple(wired), named, (), writes, tuple(map(meta_of, fresh)), () if writes else positions
        )
        if str(func) not in DYNAMIC_FORMS:
            self.constant.update(numbers)
        self.calls.append(UnitCall(signature, inputs, tuple(numbers), outputs))
        return result


def record(function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Recorded:
    """The ops that a function runs on inputs, of which it may write to copies; its results are the live tensors."""
    copies = [copy(tensor) for tensor in inputs]
    recorder = _Recorder(copies)
    with recorder:
        results = function(*copies)
    kept = tuple(value if n in recorder.constant else None for n, value in enumerate(recorder.scalars))
    live = tuple(recorder.registers[id(result)] for result in results)
    return Recorded(
        CompileUnit(tuple(recorder.calls), tuple(map(meta_of, copies)), kept, live), tuple(recorder.scalars)
    )


def copy(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    return made.requires_grad_() if tensor.requires_grad else made


def code_of(unit: CompileUnit) -> CompiledCode:
    """The unit as code that is traced and not compiled."""
    traced = trace(unit)
    return CompiledCode(unit, answer_of(traced), lambda given: list(traced.graph(*given)))


def answer_of(traced: TracedUnit, path: str = "") -> Compiled:
    return Compiled("key", path, traced.takes, traced.writes, traced.outputs, 0.0)


def run_both(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    code: CompiledCode,
    scalars: Sequence[Any],
) -> str | None:
    """Why code does not do what a function does."""
    with torch.no_grad():
        before, after = [copy(t).detach() for t in inputs], [copy(t) for t in inputs]
        assert code.fits(before)
    expected = function(*after)
    with torch.no_grad():
        return code.compare(code.with_own_memory(before), scalars, [t.detach() for t in after], [*expected])
