"""Op calls as rules see them: on whole tensors, expanded into several calls, and as one worker's local program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Input, ListArg, Scalar
from gt.sharding.boxes import Box, Shape, box_shape
from gt.sharding.spec import ShardingSpec, local_box


class OpCall(NamedTuple):
    """One call of an op on whole tensors. `Input(i)` among the arguments is the tensor `inputs[i]`.

    An op that writes appears in its functional form: `x.add_(y)` and `torch.add(x, y, out=z)` are calls of add with one
    output. `outputs` are the new tensors, followed by the new values of the written ones. `output_positions` are the
    positions of the outputs among the results that the op returns; empty: all results that are not None.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    output_positions: tuple[int, ...] = ()

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by its position or its name; lists come as tuples."""
        value = self.args[position] if position < len(self.args) else self.kwargs.get(name, default)
        return value.values if isinstance(value, ListArg) else value

    def tensor(self, position: int, name: str) -> int | None:
        """The position of a tensor argument among the inputs; None if it is absent."""
        value = self.arg(position, name)
        return value.index if isinstance(value, Input) else None

    @property
    def shapes(self) -> list[Shape]:
        return [meta.shape for meta in self.inputs]

    @property
    def result_shapes(self) -> list[Shape]:
        return [meta.shape for meta in self.outputs]


def inputs_in(args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> Iterator[Input]:
    """The tensors among arguments, in order."""
    for value in [*args, *kwargs.values()]:
        if isinstance(value, Input):
            yield value
        elif isinstance(value, ListArg):
            yield from inputs_in(value.values, {})


def has_scalars(args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> bool:
    """Whether some argument is a scalar that changes from call to call."""
    values = [*args, *kwargs.values()]
    return any(isinstance(v, Scalar) or (isinstance(v, ListArg) and has_scalars(v.values, {})) for v in values)


def with_inputs(value: Arg, change: Callable[[Input], Arg]) -> Arg:
    """An argument with every tensor in it replaced."""
    if isinstance(value, Input):
        return change(value)
    if isinstance(value, ListArg):
        return ListArg(tuple([with_inputs(item, change) for item in value.values]))
    return value


def functional_args(
    args: Sequence[Arg], kwargs: Mapping[str, Arg], dropped: frozenset[int]
) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """Arguments without those that are only written to (`out=`)."""
    kept = {name: value for name, value in kwargs.items() if not _is_dropped(value, dropped)}
    return tuple([value for value in args if not _is_dropped(value, dropped)]), kept


def _is_dropped(value: Arg, dropped: frozenset[int]) -> bool:
    positions = [found.index for found in inputs_in((value,), {})]
    return bool(positions) and dropped.issuperset(positions)


# --- An op as several ops ---------------------------------------------------------------------------------------------


class ExpandedCall(NamedTuple):
    """One call of an expansion. `Input(i)` is register i: first the inputs of the expanded call, then the outputs of
    the calls of the expansion, in order. `output_positions` as for `OpCall`."""

    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    outputs: tuple[TensorMeta, ...]
    output_positions: tuple[int, ...] = ()


class Expansion(NamedTuple):
    """An op as several calls on whole tensors, each planned by its own rule. `results` are registers."""

    calls: tuple[ExpandedCall, ...]
    results: tuple[int, ...]


# --- One worker's program ---------------------------------------------------------------------------------------------


class LocalCall(NamedTuple):
    """One call on a worker's shards, with `outputs` results. `Input(i)` is register i: first the operands, then the
    outputs of the calls. `output_positions` as for `OpCall`."""

    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    outputs: int
    output_positions: tuple[int, ...] = ()


class LocalProgram(NamedTuple):
    """The calls that one worker runs for an op. `results` are registers."""

    calls: tuple[LocalCall, ...]
    results: tuple[int, ...]


class LocalContext(NamedTuple):
    """The input of a lowering: a call on whole tensors, the layouts of its operands and results, and a worker."""

    call: OpCall
    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    worker: int

    def operand_box(self, position: int) -> Box:
        return local_box(self.operands[position], self.call.inputs[position].shape, self.worker)

    def operand_shape(self, position: int) -> Shape:
        return box_shape(self.operand_box(position))

    def result_box(self, position: int = 0) -> Box:
        return local_box(self.results[position], self.call.outputs[position].shape, self.worker)

    def result_shape(self, position: int = 0) -> Shape:
        return box_shape(self.result_box(position))

    def is_first_along(self, axes: Sequence[str]) -> bool:
        """Whether this worker has coordinate 0 along all these axes. Terms to be added once are added there."""
        mesh = self.results[0].mesh if self.results else self.operands[0].mesh
        coordinate = mesh.coordinate(self.worker)
        return all(coordinate[mesh.axis_names.index(axis)] == 0 for axis in axes)


class LocalBuilder:
    """Builds a local program: `x = b.call("aten.sub.Scalar", Input(1), offset)`."""

    def __init__(self, operands: int) -> None:
        self._registers = operands
        self._calls: list[LocalCall] = []

    def call_multi(self, op: str, outputs: int, *args: Arg, **kwargs: Arg) -> tuple[Input, ...]:
        """One call with several outputs."""
        return self._add(LocalCall(op, args, kwargs, outputs))

    def repeat(self, call: OpCall, *args: Arg, **kwargs: Arg) -> tuple[Input, ...]:
        """Call the op of `call` with other arguments, for the same outputs."""
        return self._add(LocalCall(call.op, args, kwargs, len(call.outputs), call.output_positions))

    def _add(self, call: LocalCall) -> tuple[Input, ...]:
        self._calls.append(call)
        first = self._registers
        self._registers += call.outputs
        return tuple([Input(first + position) for position in range(call.outputs)])

    def call(self, op: str, *args: Arg, **kwargs: Arg) -> Input:
        return self.call_multi(op, 1, *args, **kwargs)[0]

    def finish(self, *results: Input) -> LocalProgram:
        return LocalProgram(tuple(self._calls), tuple([result.index for result in results]))


Lowering: TypeAlias = Callable[[LocalContext], LocalProgram]
