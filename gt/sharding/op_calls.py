"""Op calls as rules see them, and the small programs that rules make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Input, ListArg, Scalar
from gt.sharding.spec import Box, Shape, ShardingSpec, box_shape, local_box, shard_index


class OpCall(NamedTuple):
    """One call of an op on whole tensors. `Input(i)` among the arguments is the tensor `inputs[i]`.

    `outputs` are the new tensors, and then the new values of those that the op writes to. An op that writes appears as
    the op without the write: `x.add_(y)` and `torch.add(x, y, out=z)` are calls of add with one output. `places` are
    the places of the outputs among the results that the op returns, where it returns results that nobody asked for;
    empty: the outputs are all the results that are not None.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    places: tuple[int, ...] = ()

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name; lists come as tuples."""
        value = self.args[position] if position < len(self.args) else self.kwargs.get(name, default)
        return value.values if isinstance(value, ListArg) else value

    def tensor(self, position: int, name: str) -> int | None:
        """Which input a tensor argument is; None where it is absent."""
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


def has_numbers(args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> bool:
    """Whether there are numbers among arguments that change from call to call."""
    values = [*args, *kwargs.values()]
    return any(isinstance(v, Scalar) or (isinstance(v, ListArg) and has_numbers(v.values, {})) for v in values)


def with_inputs(value: Arg, change: Callable[[Input], Arg]) -> Arg:
    """An argument with every tensor in it replaced."""
    if isinstance(value, Input):
        return change(value)
    if isinstance(value, ListArg):
        return ListArg(tuple([with_inputs(item, change) for item in value.values]))
    return value


# --- An op as several ops ---------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """One op of an expansion. `Input(i)` is register i: first the inputs of the call, then the outputs of the pieces
    in their order. `places` are those of a call."""

    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    outputs: tuple[TensorMeta, ...]
    places: tuple[int, ...] = ()


class Expansion(NamedTuple):
    """An op as several ops on whole tensors, each of which is planned by its own rule. `results` are registers."""

    pieces: tuple[Piece, ...]
    results: tuple[int, ...]


class Expander:
    """Writes an expansion: `x = e.call("aten.exp.default", (x,), outputs=(meta,))`."""

    def __init__(self, inputs: int) -> None:
        self._registers = inputs
        self._pieces: list[Piece] = []

    def call(
        self,
        op: str,
        args: Sequence[Arg],
        outputs: Sequence[TensorMeta],
        kwargs: Mapping[str, Arg] | None = None,
        places: Sequence[int] = (),
    ) -> tuple[Input, ...]:
        self._pieces.append(Piece(op, tuple(args), kwargs or {}, tuple(outputs), tuple(places)))
        first = self._registers
        self._registers += len(outputs)
        return tuple([Input(first + place) for place in range(len(outputs))])

    def one(self, op: str, args: Sequence[Arg], output: TensorMeta, kwargs: Mapping[str, Arg] | None = None) -> Input:
        return self.call(op, args, (output,), kwargs)[0]

    def finish(self, *results: Input) -> Expansion:
        return Expansion(tuple(self._pieces), tuple([result.index for result in results]))


# --- What one worker does ---------------------------------------------------------------------------------------------


class LocalCall(NamedTuple):
    """One op on what a worker holds. `Input(i)` is register i: first the operands, then the outputs of the calls.
    `places` are those of a call."""

    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    outputs: int
    places: tuple[int, ...] = ()


class LocalProgram(NamedTuple):
    calls: tuple[LocalCall, ...]
    results: tuple[int, ...]


class LocalContext(NamedTuple):
    """What a lowering may look at: a call on whole tensors, how they are laid out, and which worker asks."""

    call: OpCall
    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    worker: int

    def operand_box(self, place: int) -> Box:
        return local_box(self.operands[place], self.call.inputs[place].shape, self.worker)

    def operand_shape(self, place: int) -> Shape:
        return box_shape(self.operand_box(place))

    def result_box(self, place: int = 0) -> Box:
        return local_box(self.results[place], self.call.outputs[place].shape, self.worker)

    def result_shape(self, place: int = 0) -> Shape:
        return box_shape(self.result_box(place))

    def operand_index(self, place: int, dim: int) -> int:
        """Which shard of a dim of an operand this worker holds."""
        return shard_index(self.operands[place], dim, self.worker)

    def is_first_along(self, axes: Sequence[str]) -> bool:
        """Whether this worker is the one at coordinate 0 of all these axes: the one that adds what is added once."""
        mesh = self.results[0].mesh if self.results else self.operands[0].mesh
        coordinate = mesh.coordinate(self.worker)
        return all(coordinate[mesh.axis_names.index(axis)] == 0 for axis in axes)


class LocalBuilder:
    """Writes a local program: `x = b.call("aten.sub.Scalar", Input(1), offset)`."""

    def __init__(self, operands: int) -> None:
        self._registers = operands
        self._calls: list[LocalCall] = []

    def calls(self, op: str, outputs: int, *args: Arg, **kwargs: Arg) -> tuple[Input, ...]:
        return self._add(LocalCall(op, args, kwargs, outputs))

    def repeat(self, call: OpCall, *args: Arg, **kwargs: Arg) -> tuple[Input, ...]:
        """The op of a call with other arguments, which gives the same results."""
        return self._add(LocalCall(call.op, args, kwargs, len(call.outputs), call.places))

    def _add(self, call: LocalCall) -> tuple[Input, ...]:
        self._calls.append(call)
        first = self._registers
        self._registers += call.outputs
        return tuple([Input(first + place) for place in range(call.outputs)])

    def call(self, op: str, *args: Arg, **kwargs: Arg) -> Input:
        return self.calls(op, 1, *args, **kwargs)[0]

    def finish(self, *results: Input) -> LocalProgram:
        return LocalProgram(tuple(self._calls), tuple([result.index for result in results]))


Lowering: TypeAlias = Callable[[LocalContext], LocalProgram]
