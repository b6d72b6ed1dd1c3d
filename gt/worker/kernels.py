"""From a signature to something that runs: built once when an op is defined, called for every command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gt.core.meta import TensorMeta, same_places
from gt.core.signatures import Arg, Input, ListArg, Number, Path, Scalar, Signature
from gt.worker.engines.counter_rng import Region
from gt.worker.engines.engine import Engine, Value

Maker: TypeAlias = Callable[[Sequence[Value], Sequence[Number]], Any]


class Kernel:
    """An op bound to an engine: `call` takes the tensors that a command names and gives the new ones, `gives` many.

    The first result is compared with what the client was told; after that shapes and strides are trusted, because the
    same signature always has the same ones: where the strides differ, all later results are put into those that the
    client was told. `direct` is the bare op of a kernel that takes the command's tensors in order and gives one new
    tensor, which is most of them; it is there once a first call has been checked. `region` is what a random op makes
    here of its whole result. Where the engine `checks` geometry, every result is compared.
    """

    def __init__(self, engine: Engine, signature: Signature, region: Region | None = None) -> None:
        function = engine.resolve(signature.op)
        engine.check_constants(signature.op, signature.args, signature.kwargs)
        self.signature = signature
        self.writes = signature.writes
        self.gives = len(signature.outputs)
        self.direct: Callable[..., Value] | None = None
        self._engine = engine
        function = engine.seeded(signature.op, function, region) if signature.random else function
        self._is_plain = signature.floating == "float32"
        self._function = function if self._is_plain else engine.with_floating(signature.floating, function)
        self._args = [_maker(engine, arg) for arg in signature.args]
        self._kwargs = {name: _maker(engine, arg) for name, arg in signature.kwargs.items()}
        self._views = [(place, ViewKernel(engine, path)) for place, path in enumerate(signature.paths) if path]
        in_order = tuple([Input(place) for place in range(len(signature.paths))])
        self._can_be_direct = (signature.args, signature.positions) == (in_order, (0,)) and not (
            self._kwargs or self._views or self.writes or signature.random
        )
        self._checked = not signature.outputs
        self._restrides = False

    def describe(self, values: list[Value]) -> tuple[str, ...]:
        """The tensors of a call as the op sees them."""
        views = dict(self._views)
        seen = [views[place].of(value) if place in views else value for place, value in enumerate(values)]
        return tuple([str(self._engine.meta(value)) for value in seen])

    def call(self, values: list[Value], numbers: tuple[Number, ...]) -> list[Any]:
        """The new tensors of the op: those the client was told of, or all of them for a query."""
        used = list(values)
        result = self._invoke(used, numbers)
        results = _flat(result)
        if self.writes:
            results = self._finish_writes(values, used, results)
        if self.gives:
            results = [results[place] for place in self.signature.positions]
        if not self._checked:
            self._check(results)
            if self._checked and self._can_be_direct and result is results[0] and not self._restrides:
                self.direct = self._engine.shortcut(self.signature.op, values) if self._is_plain else self._function
        return self._restrided(results) if self._restrides else results

    def _restrided(self, results: list[Any]) -> list[Any]:
        return [
            None if result is None else self._engine.with_strides(result, told.stride)
            for told, result in zip(self.signature.outputs, results, strict=True)
        ]

    def _invoke(self, used: list[Value], numbers: tuple[Number, ...]) -> Any:
        """Run the op on the tensors, which are replaced by the views of them that it works on."""
        for place, view in self._views:
            used[place] = view.of(used[place])
        args = [make(used, numbers) for make in self._args]
        kwargs = {name: make(used, numbers) for name, make in self._kwargs.items()}
        if self.signature.random:
            args.insert(0, numbers[-1])
        return self._function(*args, **kwargs)

    def _finish_writes(self, values: list[Value], used: list[Value], results: list[Any]) -> list[Any]:
        """See that every write has reached its base; gives the results that are new tensors."""
        for place, view in self._views:
            if not self._engine.aliases(used[place], values[place]):
                self._write_back(place, view, values, used)
        return [result for result in results if result is None or not any(result is value for value in used)]

    def _write_back(self, place: int, view: ViewKernel, values: list[Value], used: list[Value]) -> None:
        """The view had to be a copy here; what was written to it goes to its base now."""
        written = [values[write] for write in self.writes]
        if any(values[place] is base for base in written):
            self._engine.write_through(values[place], view.of, used[place])

    def _check(self, results: list[Any]) -> None:
        """Results must be what the client's handles say. Absent ones are not: a masked gradient, which nobody reads."""
        for told, result in zip(self.signature.outputs, results, strict=True):
            found = self._engine.meta(result) if result is not None else told
            if (told.shape, told.dtype) != (found.shape, found.dtype):
                raise RuntimeError(
                    f"{self.signature.op} gave {found} where torch's shape function said {told}; "
                    f"the handle that the client holds is wrong, so this result is not used"
                )
            if told.stride != found.stride:
                self._restrides = True
                self._require_strides(told, found)
        self._checked = not self._engine.checks

    def _require_strides(self, told: TensorMeta, found: TensorMeta) -> None:
        """Where geometry is checked and torch itself computes, other strides than those that the client was told are a
        mistake of the client's."""
        is_torch = self._engine.checks and self._engine.is_reference and not self.signature.random
        if is_torch and not same_places(told.shape, told.stride, found.stride):
            op = self.signature.op
            raise RuntimeError(f"{op} gave {found} with strides {found.stride}; the client was told {told.stride}")


class UnavailableKernel:
    """An op that this worker cannot run: each call says why."""

    def __init__(self, signature: Signature, error: Exception) -> None:
        self.signature = signature
        self.writes = signature.writes
        self.gives = len(signature.outputs)
        self.direct = None
        self._error = error

    def describe(self, values: list[Value]) -> tuple[str, ...]:
        return ()

    def call(self, values: list[Value], numbers: tuple[Number, ...]) -> list[Any]:
        raise self._error


class ViewKernel:
    """A path of view ops. Where the strides here do not allow a view, its result is a copy."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._steps = [engine.view_step(step) for step in path]

    def of(self, value: Value) -> Value:
        for step in self._steps:
            value = step(value)
        return value


def _maker(engine: Engine, arg: Arg) -> Maker:
    """A function that gives an argument of a call from the call's tensors and numbers."""
    if isinstance(arg, Input):
        place = arg.index
        return lambda values, numbers: values[place]
    if isinstance(arg, Scalar):
        index = arg.index
        return lambda values, numbers: numbers[index]
    if isinstance(arg, ListArg) and any(isinstance(item, Input | Scalar) for item in arg.values):
        makers = [_maker(engine, item) for item in arg.values]
        return lambda values, numbers: [make(values, numbers) for make in makers]
    constant = engine.literal(arg)
    return lambda values, numbers: constant


def _flat(result: Any) -> list[Any]:
    """The results of an op in one list, with None for absent ones."""
    if not isinstance(result, list | tuple):
        return [result]
    flat: list[Any] = []
    for item in result:
        flat.extend(_flat(item))
    return flat
