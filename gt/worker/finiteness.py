"""Finds the commands that make NaN or infinity, for sessions that ask for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gt.core.ids import is_dispatcher_id, session_of
from gt.core.messages import MAX_NON_FINITE, Command, NonFiniteCall, QueryOp, RunOp
from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Complex, Compute, ListArg, Signature, Whole
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.bound_programs import AnyBoundOp
from gt.worker.engines.engine import Engine, Finiteness
from gt.worker.failed_value import FailedValue
from gt.worker.memory_recorder import HeldTensors

FINITE = Finiteness(False, False)


class _CheckedTensor(NamedTuple):
    """A tensor's state when it was checked, since the command that reads it may write to it too. Without a `meta` it
    had no value; only floats that are all finite have `extremes`."""

    meta: TensorMeta | None
    finiteness: Finiteness
    extremes: tuple[float, float] | None

    def describe(self) -> str:
        between = "" if self.extremes is None else " from {:.4g} to {:.4g}".format(*self.extremes)
        return f"{self.meta or 'no value,'} {describe_finiteness(self.finiteness)}{between}"


_WITHOUT_VALUE = _CheckedTensor(None, FINITE, None)


class _Session:
    """The commands found for a session, and its tensors that were checked, by id. Without `infinity`, only those
    commands count that made NaN. `is_done`: the first command that made NaN or infinity on this worker alone is found,
    and all that follows may be its consequence."""

    def __init__(self, infinity: bool) -> None:
        self.infinity = infinity
        self.calls: list[NonFiniteCall] = []
        self.known: dict[int, _CheckedTensor] = {}
        self.newest = 0
        self.is_done = False


class FinitenessWatch:
    """Checks tensors for NaN and infinity once, after the command that makes them, or before the first command that
    reads them. `is_on` says whether any session asks for it."""

    def __init__(self, engine: Engine, tensors: HeldTensors, ops: Mapping[int, AnyBoundOp]) -> None:
        self.is_on = False
        self._engine = engine
        self._tensors = tensors
        self._ops = ops
        self._sessions: dict[int, _Session] = {}
        self._inputs: list[_CheckedTensor] = []  # inputs of the running command

    def read(self, session: int, *, goes_on: bool, infinity: bool = True) -> tuple[NonFiniteCall, ...]:
        """The commands found so far. Without `goes_on` they are forgotten, and the search ends."""
        found = self._sessions.setdefault(session, _Session(infinity))
        if not goes_on:
            self.forget(session)
        self.is_on = bool(self._sessions)
        return tuple(found.calls)

    def forget(self, session: int) -> None:
        self._sessions.pop(session, None)
        self.is_on = bool(self._sessions)

    def _session_of(self, command: Command) -> _Session | None:
        """The session whose command is to be checked."""
        if not isinstance(command, RunOp | QueryOp):
            return None
        session = self._sessions.get(session_of(command.op_id))
        return session if session is not None and not session.is_done else None

    def begin(self, command: Command) -> None:
        """Check the inputs of a command, before it writes to them."""
        session = self._session_of(command)
        if session is not None:
            assert isinstance(command, RunOp | QueryOp)
            self._inputs = [self._check(session, ident) for ident in command.inputs]

    def end(self, command: Command) -> None:
        """Check the outputs of a command, and note it if they, or inputs that it sends to others, are not finite."""
        session = self._session_of(command)
        if session is None:
            return
        assert isinstance(command, RunOp | QueryOp)
        outputs = list(self._outputs(command))
        session.newest = max([session.newest, *[ident for ident in outputs if not is_dispatcher_id(ident)]])
        for ident in (*command.inputs, *outputs):  # written tensors have changed, or have other ids
            if ident in outputs or ident not in self._tensors:
                session.known.pop(ident, None)
        made = _union(self._check(session, ident).finiteness for ident in outputs)
        bound = self._ops[command.op_id]
        exchanges = isinstance(bound, BoundOpProgram) and not bound.is_local
        is_origin = (session.infinity or made.has_nan) and self._is_origin(command, bound, made)
        if is_origin or (exchanges and any(any(tensor.finiteness) for tensor in self._inputs)):
            self._note(session, command, bound, made, is_origin, exchanges)

    def _outputs(self, command: RunOp | QueryOp) -> Iterator[int]:
        if isinstance(command, RunOp):
            yield from command.outputs
            return
        yield from command.written
        result = command.first
        while result in self._tensors:
            yield result
            result += 1

    def _check(self, session: _Session, ident: int) -> _CheckedTensor:
        found = session.known.get(ident)
        if found is None:
            found = session.known[ident] = self._checked(ident)
        return found

    def _checked(self, ident: int) -> _CheckedTensor:
        """Extremes are asked first: finite ones say that all is finite, in one pass over the tensor."""
        value = self._tensors.get(ident)
        if value is None or isinstance(value, FailedValue):
            return _WITHOUT_VALUE
        meta, extremes = self._engine.meta(value), self._engine.extremes(value)
        if extremes is not None and all(map(math.isfinite, extremes)):
            return _CheckedTensor(meta, FINITE, extremes)
        return _CheckedTensor(meta, self._engine.finiteness(value), None)

    def _is_origin(self, command: RunOp | QueryOp, bound: AnyBoundOp, made: Finiteness) -> bool:
        """Whether NaN came of tensors and numbers without NaN, or infinity of finite ones. An op that takes no tensors,
        or leaves memory unwritten, is none."""
        if not any(made) or not command.inputs or ("." in bound.op and self._engine.leaves_unwritten(bound.op)):
            return False
        inputs = [tensor.finiteness for tensor in self._inputs]
        given = _union((*inputs, *map(_of_number, command.scalars), *map(_of_number, _constants(bound))))
        return (made.has_nan and not given.has_nan) or (made.has_inf and not any(given))

    def _note(
        self,
        session: _Session,
        command: RunOp | QueryOp,
        bound: AnyBoundOp,
        made: Finiteness,
        is_origin: bool,
        exchanges: bool,
    ) -> None:
        output = next(self._outputs(command), 0)
        collective = f" ({bound.collective})" if isinstance(bound, BoundOpProgram) and bound.collective else ""
        session.calls.append(
            NonFiniteCall(
                f"{bound.op}{collective}",
                command.site,
                output,
                session.newest,
                *made,
                tuple(tensor.describe() for tensor in self._inputs[:MAX_NON_FINITE]),
                is_origin,
                exchanges,
            )
        )
        session.is_done = len(session.calls) == MAX_NON_FINITE or (is_origin and not exchanges)
        if session.is_done:
            session.known.clear()


def describe_finiteness(finiteness: Finiteness) -> str:
    found = [name for name, holds in zip(("NaN", "infinity"), finiteness, strict=True) if holds]
    return f"with {' and '.join(found)}" if found else "finite"


def _union(parts: Iterable[Finiteness]) -> Finiteness:
    all_parts = list(parts)
    return Finiteness(any(part.has_nan for part in all_parts), any(part.has_inf for part in all_parts))


def _of_number(number: object) -> Finiteness:
    if isinstance(number, Complex):
        return _union((_of_number(number.real), _of_number(number.imag)))
    if not isinstance(number, float) or math.isfinite(number):
        return FINITE
    return Finiteness(math.isnan(number), math.isinf(number))


def _constants(bound: AnyBoundOp) -> Iterator[Arg]:
    """The constant arguments of an op, or of all steps of its program."""
    calls: Sequence[Signature | Compute] = (
        [bound.signature]
        if not isinstance(bound, BoundOpProgram)
        else [
            step.signature if isinstance(step, Whole) else step
            for step in bound.program.steps
            if isinstance(step, Compute | Whole)
        ]
    )
    for call in calls:
        for arg in (*call.args, *call.kwargs.values()):
            yield from arg.values if isinstance(arg, ListArg) else (arg,)
