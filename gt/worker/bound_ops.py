"""Ops bound to an engine: the function of a signature, built once when the op is defined and called per command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Input, ListArg, Number, Scalar, Signature, ViewSteps, random_key
from gt.worker.direct_calls import DirectCall, bind_arguments, is_in_order
from gt.worker.engines.counter_rng import Region
from gt.worker.engines.engine import Engine, Value
from gt.worker.memory_guard import LARGE_BYTES, MemoryGuard

ArgumentOf: TypeAlias = Callable[[Sequence[Value], Sequence[Number]], Any]
"""One argument of a call, from the tensors and the scalars of the command."""


class BoundOp:
    """An op bound to an engine. `call` takes the tensors of a command and returns `output_count` new tensors.

    The first results are compared with the metas that the signature declares, as the client has inferred them. After
    that shapes are trusted, because one signature always has the same ones; if strides differ, all later results are
    copied into the declared ones. With `checks_geometry` every result is compared.

    `direct` is the op as a function of the command's tensors and scalars that returns one tensor: a new one, or the one
    that it writes to. It is set once a first call has been checked, for ops of this kind, which most are. `region` is
    the part of its result that a random op computes on this worker. `nbytes` is the size of its results; with a
    `guard`, memory for large ones is reserved before each call. `gives_tensor`: the last call has returned a tensor and
    not several, some of which may be None."""

    def __init__(
        self, engine: Engine, signature: Signature, region: Region | None = None, guard: MemoryGuard | None = None
    ) -> None:
        self.nbytes = sum([meta.nbytes for meta in signature.outputs])
        self._guard = guard if guard is not None and self.nbytes >= LARGE_BYTES else None
        function = engine.resolve(signature.op)
        engine.check_constants(signature.op, signature.args, signature.kwargs)
        self.signature = signature
        self.op = signature.op
        self.writes = signature.writes
        self.fully_written = signature.fully_written
        self.output_count = len(signature.outputs)
        self.direct: DirectCall | None = None
        self.gives_tensor = False
        self._engine = engine
        function = engine.seeded(signature.op, function, region) if signature.random else function
        self._is_plain = signature.default_dtype == "float32"
        self._function = function if self._is_plain else engine.with_default_dtype(signature.default_dtype, function)
        self._args = [_argument_of(engine, arg) for arg in signature.args]
        self._kwargs = {name: _argument_of(engine, arg) for name, arg in signature.kwargs.items()}
        named = [arg.index for arg in signature.kwargs.values() if isinstance(arg, Input)]
        self._outs = frozenset(self.writes) & frozenset(named)
        self._views = [(position, BoundView(engine, path)) for position, path in enumerate(signature.paths) if path]
        gives_one = signature.positions == (0,) if not self.writes else len(self.writes) == 1 and not signature.outputs
        self._can_be_direct = gives_one and not (self._views or self._outs or signature.random)
        self._checked = not signature.outputs
        self._restrides = False

    def describe(self, values: list[Value]) -> tuple[str, ...]:
        """The metas of a call's tensors, after its view paths were applied."""
        views = dict(self._views)
        viewed = [views[position].of(value) if position in views else value for position, value in enumerate(values)]
        return tuple(str(self._engine.meta(value)) for value in viewed)

    def call(self, values: list[Value], scalars: tuple[Number, ...]) -> list[Any]:
        """The new tensors of the op: the outputs of its signature, or all of them for a query. Hot path."""
        used = list(values)
        if self._guard is not None:
            self._guard.reserve(self.nbytes)
        result = self._invoke(used, scalars)
        self.gives_tensor = not isinstance(result, list | tuple)
        results = _flat(result)
        if self.writes:
            results = self._finish_writes(values, used, results)
        if self.output_count:
            results = [results[position] for position in self.signature.positions]
        if not self._checked:
            self._check(results)
        if self._can_be_direct and not self._restrides:
            self._can_be_direct = False  # one attempt is enough
            if result is (values[self.writes[0]] if self.writes else results[0]):
                self.direct = self.make_direct(values, scalars)
        return self._restrided(results) if self._restrides else results

    def make_direct(self, values: Sequence[Value], scalars: tuple[Number, ...]) -> DirectCall | None:
        """The op as a direct call, for tensors and scalars like these; None where it cannot be one."""
        args, kwargs, count = self.signature.args, self.signature.kwargs, len(values)
        function = self._function
        if self._is_plain:
            given = scalars if is_in_order(args, kwargs, count, len(scalars)) else None
            function = self._engine.shortcut(self.signature.op, values, given)
        direct = bind_arguments(function, args, kwargs, count, len(scalars), self._engine.literal)
        if self._guard is not None and direct is not None:
            direct = self._guard.reserving(self.nbytes, direct)
        return self._compared(direct) if self._engine.checks_geometry and direct and not self.writes else direct

    def _compared(self, direct: DirectCall) -> DirectCall:
        """A direct call whose results are all compared with the declared metas."""

        def call(*given: Any) -> Any:
            results = [direct(*given)]
            if self.signature.outputs:
                self._check(results)
            return self._restrided(results)[0] if self._restrides else results[0]

        return call

    def _restrided(self, results: list[Any]) -> list[Any]:
        return [
            None if result is None else self._engine.with_strides(result, declared.stride)
            for declared, result in zip(self.signature.outputs, results, strict=True)
        ]

    def _invoke(self, used: list[Value], scalars: tuple[Number, ...]) -> Any:
        """Run the op on the tensors in `used`, which are replaced by their views first. An `out=` is a copy of its
        view, written back later: some of torch's kernels give an `out=` other strides. The copy has the strides of the
        view, because other kernels write to it as if it lay in memory as an operand does."""
        for position, view in self._views:
            used[position] = view.of(used[position])
            if position in self._outs:
                used[position] = self._engine.copy(used[position])
        args = [argument(used, scalars) for argument in self._args]
        kwargs = {name: argument(used, scalars) for name, argument in self._kwargs.items()}
        if self.signature.random:
            args.insert(0, random_key(scalars))
        return self._function(*args, **kwargs)

    def _finish_writes(self, values: list[Value], used: list[Value], results: list[Any]) -> list[Any]:
        """Write copied views back to their bases; returns the results that are new tensors."""
        for position, view in self._views:
            if not self._engine.aliases(used[position], values[position]):
                self._write_back(position, view, values, used)
        return [result for result in results if result is None or not any(result is value for value in used)]

    def _write_back(self, position: int, view: BoundView, values: list[Value], used: list[Value]) -> None:
        """Write the copy that stands for a view to its base, if the op wrote to that base."""
        written = [values[write] for write in self.writes]
        if any(values[position] is base for base in written):
            self._engine.write_through(values[position], view.of, used[position])

    def _check(self, results: list[Any]) -> None:
        """Compare results with the metas of the client's handles. A missing one is a masked gradient, never read."""
        for declared, result in zip(self.signature.outputs, results, strict=True):
            found = self._engine.meta(result) if result is not None else declared
            if (declared.shape, declared.dtype) != (found.shape, found.dtype):
                raise RuntimeError(
                    f"{self.signature.op} gave {found} where torch's shape function said {declared}; "
                    f"the handle that the client holds is wrong, so this result is not used"
                )
            if declared.stride != found.stride:
                self._restrides = True
                self._require_strides(declared, found)
        self._checked = not self._engine.checks_geometry

    def _require_strides(self, declared: TensorMeta, found: TensorMeta) -> None:
        """Raise if torch's CPU kernel gives other strides than the declared ones, where geometry is checked."""
        is_torch = self._engine.checks_geometry and self._engine.is_torch_cpu and not self.signature.random
        if is_torch and 0 not in declared.shape:
            op = self.signature.op
            raise RuntimeError(f"{op} gave {found} with strides {found.stride}; it should be {declared.stride}")


class UnavailableOp:
    """An op that this worker cannot run: each call raises the error of its definition."""

    def __init__(self, signature: Signature, error: Exception) -> None:
        self.signature = signature
        self.op = signature.op
        self.writes = signature.writes
        self.fully_written = ()
        self.output_count = len(signature.outputs)
        self.direct = None
        self._error = error

    def describe(self, values: list[Value]) -> tuple[str, ...]:
        return ()

    def call(self, values: list[Value], scalars: tuple[Number, ...]) -> list[Any]:
        raise self._error


class BoundView:
    """A path of view ops. Where the strides of this worker's tensor do not allow a view, the result is a copy."""

    def __init__(self, engine: Engine, path: ViewSteps) -> None:
        self._steps = [engine.make_view(step) for step in path]

    def of(self, value: Value) -> Value:
        for step in self._steps:
            value = step(value)
        return value


def _argument_of(engine: Engine, arg: Arg) -> ArgumentOf:
    if isinstance(arg, Input):
        position = arg.index
        return lambda values, scalars: values[position]
    if isinstance(arg, Scalar):
        index = arg.index
        return lambda values, scalars: scalars[index]
    if isinstance(arg, ListArg) and any(isinstance(item, Input | Scalar) for item in arg.values):
        items = [_argument_of(engine, item) for item in arg.values]
        return lambda values, scalars: [item(values, scalars) for item in items]
    constant = engine.literal(arg)
    return lambda values, scalars: constant


def _flat(result: Any) -> list[Any]:
    """The results of an op in one list, with None for missing ones."""
    if not isinstance(result, list | tuple):
        return [result]
    flat: list[Any] = []
    for item in result:
        flat.extend(_flat(item))
    return flat
