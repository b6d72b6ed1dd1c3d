"""Record a program for propagation by running it on meta tensors.

    record(lambda a, w: a @ w, a=(4, 8), w=(8, 6))

gives the program and the names of its results; a value that is not an argument is named after the op that gives it:
`mm`, `mm_1`, ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gt.sharding.op_calls import OpCall
from gt.sharding.program_trace import ProgramTrace, TracedOp
from tests.sharding.simulate import encode, flat, meta_of


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.kept: list[torch.Tensor] = []  # an id is a name only while its tensor lives
        self.values: dict[str, Any] = {}
        self.ops: list[TracedOp] = []

    def name(self, tensor: torch.Tensor, wanted: str) -> str:
        numbered = (wanted if not n else f"{wanted}_{n}" for n in range(len(self.values) + 1))
        name = next(name for name in numbered if name not in self.values)
        self.names[id(tensor)] = name
        self.kept.append(tensor)
        self.values[name] = meta_of(tensor)
        return name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.detach.default:
            self.names[id(result)] = self.names[id(args[0])]
            self.kept.append(result)
            return result
        given: list[torch.Tensor] = []
        call_args = tuple([encode(value, given) for value in args])
        call_kwargs = {key: encode(value, given) for key, value in (kwargs or {}).items()}
        results = flat(result)
        inputs = tuple([self.names[id(tensor)] for tensor in given])
        outputs = tuple([self.name(tensor, func._opname) for tensor in results])
        call = OpCall(str(func), call_args, call_kwargs, tuple(map(meta_of, given)), tuple(map(meta_of, results)))
        self.ops.append(TracedOp(call, inputs, outputs))
        return result


def record(function: Callable[..., Any], **shapes: tuple[int, ...] | torch.Tensor) -> ProgramTrace:
    """Arguments are shapes of float tensors, or meta tensors. Results get the names result, result_1, ..."""
    recorder = Recorder()
    given = {
        name: torch.empty(shape, device="meta") if isinstance(shape, tuple) else shape for name, shape in shapes.items()
    }
    for name, tensor in given.items():
        recorder.name(tensor, name)
    with recorder:
        results = flat(function(**given))
    renamed = {recorder.names[id(tensor)]: f"result_{n}" if n else "result" for n, tensor in enumerate(results)}

    def new(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([renamed.get(name, name) for name in names])

    ops = [TracedOp(op.call, new(op.inputs), new(op.outputs)) for op in recorder.ops]
    return ProgramTrace({renamed.get(name, name): meta for name, meta in recorder.values.items()}, tuple(ops))
