"""`gt.compile`: a function whose later calls send recorded instructions and do not run its Python code."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, eq, is_
from threading import Lock, RLock, get_ident
from typing import Any, overload

import torch

from gt.client import session as sessions
from gt.client.compilation.call_effects import (
    CallTensors,
    Conclusion,
    NotRepeatable,
    read_ref,
    read_requires_grad,
    version_of,
)
from gt.client.compilation.call_recorder import CallRecorder, Recording, ambient_state
from gt.client.compilation.program_numbers import NumberPlan, StepNumbers, VaryingNumber, plan_numbers, same_number
from gt.client.compilation.random_keys import plan_keys
from gt.client.compilation.recorded_calls import RecordedCall, RecordedProgram, Source
from gt.client.compilation.traced_numbers import NumberTrace
from gt.client.compilation.watched_state import WatchedState
from gt.client.interrupts import CriticalSection
from gt.client.session import Session
from gt.client.storage import Storage
from gt.client.tensor import Tensor, to_gt
from gt.client.torch_patches.autograd_nodes import current_node
from gt.client.torch_patches.dispatch_modes import current_dispatch_modes
from gt.client.torch_patches.pytree import tree_flatten, tree_unflatten
from gt.client.tracebacks import ends_on_users_line
from gt.signals.registry import registry

RECORDED_CALLS = 3  # calls that must agree before the function is skipped
MAX_ATTEMPTS = 12  # recorded calls after which a function that does not repeat itself is no longer recorded
MAX_VARIANTS = 32  # recordings of one function, for different arguments
MAX_PROGRAMS = 8  # recordings for the same arguments, for different states of the function

_key, _storage = attrgetter("key"), attrgetter("_ref.storage")
_NUMBERS = (int, float, bool, str, bytes, type(None), torch.dtype)
_recording = Lock()  # held by the thread that records a call
_recording_thread = 0


@overload
def compile(function: Callable[..., Any], *, state: Iterable[object] = ...) -> CompiledFunction: ...


@overload
def compile(
    function: None = None, *, state: Iterable[object] = ...
) -> Callable[[Callable[..., Any]], CompiledFunction]: ...


def compile(function: Callable[..., Any] | None = None, *, state: Iterable[object] = ()) -> Any:
    """A function that runs its Python code in its first calls only: later calls send the same instructions again.

    `state` are objects that the function uses and GT cannot find by itself: optimizers, modules or tensors that are
    neither variables of the function nor attributes of its objects.

    >>> import gt, torch
    >>> model = gt.to(torch.nn.Linear(4, 1))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> @gt.compile
    ... def step(x, y):
    ...     optimizer.zero_grad()
    ...     loss = (model(x) - y).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss
    >>> x, y = gt.randn(8, 4), gt.randn(8, 1)
    >>> losses = [step(x, y) for _ in range(20)]
    >>> step.skipped > 10, bool(losses[-1] < losses[0])
    (True, True)
    """
    if function is None:
        return lambda decorated: CompiledFunction(decorated, state)
    if not callable(function):
        raise TypeError(f"gt.compile takes a function or a module, not {type(function).__name__}")
    return CompiledFunction(function, state)


class CompiledFunction:
    """A function of `gt.compile`. `recorded` and `skipped` count its calls that ran the code and that did not;
    `reasons` tell why calls were not skipped."""

    def __init__(self, function: Callable[..., Any], state: Iterable[object]) -> None:
        self._function = self.__wrapped__ = function
        self._state = list(state)
        self._epoch: tuple[object, ...] = ()
        self._lock = RLock()
        self._variants: dict[tuple[Any, ...], _Variant] = {}
        self._told: set[str] = set()
        self.recorded = 0
        self.skipped = 0
        self.reasons: list[str] = []
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    @ends_on_users_line
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _recording_thread == get_ident() or current_node() is not None or current_dispatch_modes():
            return self._function(*args, **kwargs)  # part of another recording or of a backward, or intercepted
        session = sessions.active or sessions.current()
        session.require_open()
        call = _Call(session, args, kwargs)
        with self._lock:
            program, variant = self._find(call)
            if program is not None:
                self.skipped += 1
                return program.run(call)
        if variant is None or variant.refused:
            return self._function(*args, **kwargs)
        return self._record(variant, call)

    def _find(self, call: _Call) -> tuple[_SkippableCall | None, _Variant | None]:
        """The program to run for a call, or else the variant to record it in."""
        epoch = (call.session, call.session.workers, registry.version)
        if epoch != self._epoch:  # another session, other workers or other signals: recorded anew
            self._epoch = epoch
            self._variants.clear()
        variant = self._variants.get(call.key) or self._add_variant(call.key)
        programs = variant.programs if variant is not None else []
        return next((program for program in reversed(programs) if program.holds(call)), None), variant

    def _add_variant(self, key: tuple[Any, ...]) -> _Variant | None:
        if len(self._variants) >= MAX_VARIANTS:
            self._tell(f"it was called with more than {MAX_VARIANTS} kinds of arguments; other kinds are not recorded")
            return None
        variant = self._variants[key] = _Variant()
        return variant

    def _record(self, variant: _Variant, call: _Call) -> Any:
        global _recording_thread
        if not _recording.acquire(blocking=False):  # another thread records
            return self._function(*call.args, **call.kwargs)
        try:
            _recording_thread = get_ident()
            self.recorded += 1
            roots = [("the function", self._function), *[("state", each) for each in self._state], *call.objects]
            output, reason = variant.record(self._function, call, roots)
        finally:
            _recording_thread = 0
            _recording.release()
        if reason:
            self._tell(reason)
        return output

    def _tell(self, reason: str) -> None:
        if reason in self._told:
            return
        self._told.add(reason)
        self.reasons.append(reason)
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        warnings.warn(f"gt.compile runs the code of {name} in every call: {reason}", RuntimeWarning, stacklevel=5)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_function":
            raise AttributeError(name)
        return getattr(self._function, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """A copy has recordings of its own."""
        return CompiledFunction(copy.deepcopy(self._function, memo), copy.deepcopy(self._state, memo))

    def __reduce__(self) -> Any:
        return CompiledFunction, (self._function, self._state)

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", None) or repr(self._function)
        return f"gt.compile({name}): {self.recorded} calls recorded, {self.skipped} skipped"


class _Call:
    """One call: its arguments with plain tensors moved to GT, and the key of everything that decides which recording
    it may repeat, except for the state of the function."""

    __slots__ = ("args", "floats", "key", "kwargs", "leaves", "objects", "session", "structure", "tensors")

    def __init__(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, structure = tree_flatten((args, kwargs))
        self.session = session
        self.objects: list[tuple[str, object]] = []
        if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, Tensor) for leaf in leaves):
            leaves = [_on_gt(leaf) for leaf in leaves]
            args, kwargs = tree_unflatten(leaves, structure)
        self.args, self.kwargs = args, kwargs
        self.leaves, self.structure = leaves, structure
        self.floats = [leaf for leaf in leaves if type(leaf) is float]
        self.tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.key = (
            structure,
            tuple(map(self._described, leaves)),
            _pattern(map(id, map(_storage, self.tensors))),
            ambient_state(),
        )

    def traced(self, trace: NumberTrace) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with traced floats."""
        if not trace.traced:
            return self.args, self.kwargs
        traced = iter(trace.traced)
        leaves = [next(traced) if type(leaf) is float else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)  # type: ignore[no-any-return]

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf._ref.key, leaf.requires_grad, leaf.is_leaf, type(leaf)
        if type(leaf) is float:
            return float
        if isinstance(leaf, _NUMBERS):
            return type(leaf), leaf
        self.objects.append((f"an argument of type {type(leaf).__name__}", leaf))
        return _Identity(leaf)


class _Identity:
    """An object as a part of a key, by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _on_gt(leaf: Any) -> Any:
    return to_gt(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _pattern(storages: Iterable[int]) -> tuple[int, ...]:
    """For each storage the first position of the same one."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(storage, position) for position, storage in enumerate(storages)])


class _Variant:
    """The recordings for one kind of arguments. `refused` tells why no more calls are recorded, if so."""

    def __init__(self) -> None:
        self.programs: list[_SkippableCall] = []
        self.refused = ""
        self._pending: list[list[_Attempt]] = []  # calls that agree with each other, too few yet
        self._earlier: list[_Attempt] = []  # a call of each program, which tells constants from arguments
        self._attempts = 0
        self._stepped: dict[int, list[Tensor]] = {}  # parameters of steps in the last call, by id() of the optimizer

    def record(self, function: Callable[..., Any], call: _Call, roots: Sequence[tuple[str, object]]) -> tuple[Any, str]:
        """Run the function and record it. Returns what it returns, and why it will not be skipped, if so."""
        attempt = _Attempt(call, roots, self._stepped)
        output = attempt.run(function)
        self._stepped.update((id(steps.optimizer), steps.place.parameters) for steps in attempt.steps if steps.place)
        self._attempts += 1
        if attempt.reason:
            return output, self._give_up_after(attempt.reason)
        differences = [attempt.other_state(calls[-1]) or attempt.difference(calls[-1]) for calls in self._pending]
        calls = next((calls for calls, found in zip(self._pending, differences, strict=True) if not found), [])
        if not calls:
            self._pending = [*self._pending[1 - MAX_PROGRAMS :], calls]
        calls.append(attempt)
        if len(calls) < RECORDED_CALLS:
            return output, self._give_up_after(f"its calls differ: {differences[-1] if differences else ''}")
        try:
            earlier = [each for each in self._earlier if not attempt.difference(each)]
            self.programs.append(_SkippableCall(calls, earlier))
        except VaryingNumber as error:
            self.refused = str(error)
        attempt.forget_tensors()
        self._earlier.append(attempt)
        self._pending.remove(calls)
        self._attempts = 0
        if len(self.programs) >= MAX_PROGRAMS and not self.refused:
            self.refused = f"it was recorded {MAX_PROGRAMS} times for the same arguments, and its state still changes"
        return output, self.refused

    def _give_up_after(self, reason: str) -> str:
        if self._attempts >= MAX_ATTEMPTS:
            self.refused = reason
        return self.refused


class _Attempt:
    """A call that is recorded. `reason` tells why it cannot be repeated, if so."""

    def __init__(self, call: _Call, roots: Sequence[tuple[str, object]], stepped: dict[int, list[Tensor]]) -> None:
        self.call = call
        self.reason = ""
        self.watched = WatchedState(roots)
        arguments = {id(tensor) for tensor in call.tensors}
        others = [tensor for tensor in self.watched.tensors if id(tensor) not in arguments]
        optimizers = self.watched.optimizers
        counts = {id(value) for each in optimizers for entries in each.state.values() for value in entries.values()}
        self.before = CallTensors([*_unique(call.tensors), *others], self.watched.plain, counts)
        self.steps = [StepNumbers(optimizer, stepped.get(id(optimizer))) for optimizer in optimizers]
        self.trace = NumberTrace(call.floats)
        self.recorded: RecordedCall

    def run(self, function: Callable[..., Any]) -> Any:
        args, kwargs = self.call.traced(self.trace)
        with CallRecorder(self.call.session) as recording:
            output = function(*args, **kwargs)
            try:
                conclusion = Conclusion(recording, self.before)
                output, templates, structure = conclusion.results(output)
                self.recorded = conclusion.call(templates, structure)
            except NotRepeatable as error:
                self.reason = str(error)
        self.reason = self.reason or self._reason(recording)
        return output

    def _reason(self, recording: Recording) -> str:
        for steps in self.steps:
            steps.align(self.recorded, self.before.tensors)
        if reason := recording.void or recording.side_effect():
            return reason
        if changed := self.watched.change_inside():
            return f"it changes {changed}, which a skipped call would not; change it outside of the function"
        for steps in self.steps:
            if setting := steps.changed_setting():
                return f"it sets {setting!r} of an optimizer, which a skipped call would not; set it outside"
        counted = {id(tensor) for steps in self.steps for tensor in steps.counts()}
        for tensor, version in zip(self.before.plain, self.before.plain_versions, strict=True):
            if id(tensor) not in counted and version_of(tensor) != version:
                if id(tensor) in self.before.counts:
                    return "GT cannot tell the numbers of an optimizer's next steps from those of the last ones"
                return "it writes to a plain tensor, which a skipped call would not; have that tensor on GT"
        self.keys = plan_keys(recording)
        if self.keys is None:
            return "it uses or sets torch's random generator for something else than ops on GT tensors"
        return ""

    def difference(self, other: _Attempt) -> str | None:
        """Where two calls differ; None if they do the same, up to their numbers."""
        assert self.keys is not None
        assert other.keys is not None
        mine, others = self.trace, other.trace
        if any(not same_number(mine.arguments[n], others.arguments[n]) for n in mine.pinned | others.pinned):
            return "it compares a float argument, which changes"
        if self.keys.places != other.keys.places:
            return "the order of random ops"
        return self.recorded.difference(other.recorded)

    def other_state(self, other: _Attempt) -> str | None:
        """Whether another call found other objects: its tensors then have other positions."""
        arguments = len(_unique(self.call.tensors))
        pairs = (
            (self.before.tensors[arguments:], other.before.tensors[arguments:]),
            (self.before.plain, other.before.plain),
            (self.watched.optimizers, other.watched.optimizers),
        )
        if any(len(mine) != len(others) or not all(map(is_, mine, others)) for mine, others in pairs):
            return "it uses other tensors or optimizers"
        return None

    def forget_tensors(self) -> None:
        """Keep what tells numbers from constants only."""
        self.recorded.recording.externals.clear()
        self.recorded.recording.operands.clear()
        del self.call, self.before, self.watched, self.steps


class _SkippableCall:
    """A recorded call that is repeated without its function, as long as it `holds`."""

    def __init__(self, attempts: Sequence[_Attempt], earlier: Sequence[_Attempt]) -> None:
        last = attempts[-1]
        recorded = last.recorded
        self._watched = WatchedState(last.watched.roots)
        self._signatures = last.call.session.signatures
        assert last.keys is not None
        self._numbers: NumberPlan = plan_numbers(
            [attempt.recorded for attempt in (*earlier, *attempts)],
            last.keys,
            [attempt.steps for attempt in attempts],
            [attempt.trace for attempt in (*earlier, *attempts)],
        )
        self._program = RecordedProgram(recorded, self._numbers.groups, self._numbers.scalars, last.call.session)
        before, tensors = last.before, last.before.tensors
        self._arguments = len(_unique(last.call.tensors))
        self._others: list[Tensor] = list(tensors[self._arguments :])
        self._in_state = {id(tensor): tensor for tensor in last.watched.tensors}
        self._state_arguments = [tensor if id(tensor) in self._in_state else None for tensor in last.call.tensors]
        self._used_gradients = [each.positions[0] for each in recorded.sources if each.kind == "grad"]
        self._plain = last.before.plain
        self._refs = list(map(read_ref, self._others))
        self._keys = list(map(_key, self._refs))
        self._storages = _pattern([*before.storage_ids, *[before.gradients[n] for n in self._used_gradients]])
        self._requires_grad = list(map(read_requires_grad, self._others))
        sources = self._program.sources
        self._shared_operands = [
            each
            for each in sources
            if each.kind in ("plain", "constant") and len(each.positions) > (each.constant is None)
        ]
        self._constant_plain = _unchanged_plain(attempts)
        self._plain_versions = list(map(version_of, self._constant_plain))
        self._with_gradient = _seen_gradients([attempt.before for attempt in attempts])

    def holds(self, call: _Call) -> bool:
        """Whether everything is as it was when the call was recorded, up to values and numbers."""
        if call.session.signatures is not self._signatures or self._watched.first_change() is not None:
            return False
        mine = [tensor if id(tensor) in self._in_state else None for tensor in call.tensors]
        if not all(map(is_, mine, self._state_arguments)):
            return False
        others = self._others
        refs = list(map(read_ref, others))
        if not all(map(is_, refs, self._refs)):
            if not all(map(is_, map(_key, refs), self._keys)):
                return False
            self._refs = refs
        tensors = [*_unique(call.tensors), *others]
        return (
            list(map(read_requires_grad, others)) == self._requires_grad
            and self._gradients_match(tensors)
            and self._storage_pattern(tensors) == self._storages
            and self._operands_match(call.session)
            and self._numbers.prepare(call.floats)
        )

    def run(self, call: _Call) -> Any:
        """Send the instructions, and have the effects, of the recorded call."""
        session, program = call.session, self._program
        tensors = [*_unique(call.tensors), *self._others]
        scalars = self._numbers.draw(call.floats)
        externals = [self._external(session, source, tensors) for source in program.sources]
        with CriticalSection():
            table = program.emit(session, externals, scalars)
            self._numbers.commit(session, table)
            results = program.apply_effects(session, table, externals, tensors)
        session.outbox.send_if_full()
        return tree_unflatten(results, program.effects.structure)

    def _external(self, session: Session, source: Source, tensors: Sequence[Tensor]) -> Storage:
        kind, positions, constant = source
        if kind == "handle":
            return tensors[positions[0]]._ref.storage
        if constant is not None:
            return constant
        if kind == "grad":
            return tensors[positions[0]].grad._ref.storage  # type: ignore[union-attr]
        return session.operands.storage_of(self._plain[positions[0]])

    def _operands_match(self, session: Session) -> bool:
        """Whether plain tensors that had the same content still have, and those that were constant are."""
        for _, positions, constant in self._shared_operands:
            storages = {id(session.operands.storage_of(self._plain[position])) for position in positions}
            if len(storages) > 1 or (constant is not None and storages != {id(constant)}):
                return False
        return all(map(eq, map(version_of, self._constant_plain), self._plain_versions))

    def _storage_pattern(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Which of the tensors, and of the gradients that the call uses, share storages."""
        gradients = [tensors[position].grad for position in self._used_gradients]
        return _pattern(map(id, map(_storage, [*tensors, *gradients])))

    def _gradients_match(self, tensors: Sequence[Tensor]) -> bool:
        for tensor, (without, present) in zip(tensors, self._with_gradient, strict=True):
            if tensor.is_leaf:
                gradient = tensor.grad
                if (gradient is None and not without) or (gradient is not None and gradient._ref.key not in present):
                    return False
        return True


def _seen_gradients(calls: Sequence[CallTensors]) -> list[tuple[bool, set[Any]]]:
    return [
        (any(not each.gradients[position] for each in calls), {each.gradient_keys[position] for each in calls})
        for position in range(len(calls[0].tensors))
    ]


def _unchanged_plain(attempts: Sequence[_Attempt]) -> list[torch.Tensor]:
    """The plain tensors that nothing has written to in all recorded calls: the function may have computed constants
    from them. Others change from call to call, and the calls agree nevertheless."""
    first, last = attempts[0].before, attempts[-1].before
    versions = {id(tensor): version for tensor, version in zip(first.plain, first.plain_versions, strict=True)}
    pairs = zip(last.plain, last.plain_versions, strict=True)
    return [
        tensor for tensor, version in pairs if id(tensor) not in last.counts and versions.get(id(tensor)) == version
    ]


def _unique(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors, each once."""
    return list({id(tensor): tensor for tensor in tensors}.values()) if len(tensors) > 1 else list(tensors)
