"""`gt.compile`: a function whose later calls send recorded instructions and do not run its Python code."""

from __future__ import annotations

import copy
import re
import types
import warnings
from collections.abc import Callable, Iterable
from threading import Lock, RLock, get_ident
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from gt.client import active_session
from gt.client.compilation.call_arguments import CallArguments, describe_key, key_difference
from gt.client.compilation.replayable_call import ReplayableCall
from gt.client.compilation.specialization import MAX_ATTEMPTS, Disagreement, Specialization
from gt.client.compilation.specialization_table import MAX_SPECIALIZATIONS, SpecializationTable
from gt.client.torch_patches.autograd_nodes import current_node
from gt.client.torch_patches.dispatch import current_dispatch_modes
from gt.core.errors import CompileError
from gt.core.tables import count, print_bytes
from gt.core.tracebacks import ends_on_users_line
from gt.signals.registry import registry

P = ParamSpec("P")
Rest = ParamSpec("Rest")
R = TypeVar("R")

_UNCOUNTED = 0.05  # share of a limit of memory by which a plan may differ from a run
CHECK_EVERY = 64  # calls of a recording, of which the last one runs the code
_PATIENCE = 4  # calls that are recorded without a reason: the first one makes state, and three others agree
_recording = Lock()  # held by the thread that records a call
_recording_thread = 0


@overload
def compile(
    function: Callable[P, R], *, state: Iterable[object] = ..., check_every: int = ...
) -> CompiledFunction[P, R]: ...


@overload
def compile(
    function: None = None, *, state: Iterable[object] = ..., check_every: int = ...
) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...


@ends_on_users_line
def compile(
    function: Callable[..., Any] | None = None, *, state: Iterable[object] = (), check_every: int = CHECK_EVERY
) -> Any:
    """A function that runs its Python code in its first calls only: later calls send the same instructions again.

    `state` are objects that the function uses, and at which GT looks on every call besides those that the function
    names. One of each `check_every` calls runs the code, and raises gt.CompileError if it does something else than the
    recorded calls; with 1 all calls do.

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
        return lambda decorated: CompiledFunction(decorated, state, check_every)
    if not callable(function):
        raise TypeError(f"gt.compile takes a function or a module, not {type(function).__name__}")
    return CompiledFunction(function, state, check_every)


class CompiledFunction(Generic[P, R]):
    """A function of `gt.compile`. `recorded` counts the calls that ran its code and were recorded, `checked` those
    that ran it and were compared with a recording, `skipped` those that did not run it."""

    def __init__(self, function: Callable[P, R], state: Iterable[object], check_every: int = CHECK_EVERY) -> None:
        if not isinstance(check_every, int) or check_every < 1:
            raise ValueError(f"check_every of gt.compile is a whole number of calls, at least 1, not {check_every!r}")
        self._function = self.__wrapped__ = function
        self._state = list(state)
        self._epoch: tuple[object, ...] = ()
        self._lock = RLock()
        self._check_every = check_every
        self._is_method = False
        self._specializations = SpecializationTable(check_every)
        self._told: list[str] = []
        self._told_of_memory = False
        self._obstacle = ""  # why the last calls did not bring a recording nearer that can be repeated
        self._last_arguments: tuple[Any, ...] = ()  # of the last recorded call, described
        self.recorded = 0
        self.checked = 0
        self.skipped = 0
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    @ends_on_users_line
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _recording_thread == get_ident() or current_node() is not None or current_dispatch_modes():
            return self._function(*args, **kwargs)  # inside another recording, a backward or a dispatch mode
        session = active_session.active or active_session.current()
        session.require_open()
        call = CallArguments(session, args, kwargs, self._is_method)
        with self._lock:
            replayable, specialization = self._find(call)
            if replayable is not None and not replayable.is_due:
                self.skipped += 1
                return replayable.run(call)
        if specialization is None or (specialization.refused and replayable is None):
            return self._function(*args, **kwargs)
        return self._record(specialization, call, replayable)

    def uncompiled(self) -> Callable[P, R]:
        """A function that runs the code in every call: with plain tensors moved to GT first, as in a recorded call."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            call = CallArguments(active_session.current(), args, kwargs)
            return self._function(*call.args, **call.kwargs)

        return run

    def _find(self, call: CallArguments) -> tuple[ReplayableCall | None, Specialization | None]:
        """The recorded call to repeat in place of a call, if any, and the specialization of the call's arguments."""
        epoch = (call.session, call.session.workers, registry.version)
        if epoch != self._epoch:  # another session, other workers or other signals: recorded anew
            self._epoch = epoch
            self._specializations.clear()
        specialization = self._specializations.find(call)
        if specialization is None:
            self._tell(
                f"it was called with more than {MAX_SPECIALIZATIONS} kinds of arguments; other kinds are not recorded"
            )
        return (specialization.find(call) if specialization is not None else None), specialization

    def _record(self, specialization: Specialization, call: CallArguments, replayable: ReplayableCall | None) -> Any:
        """Run the code and record the call, or compare it with the recorded one that applies to it, unless another
        thread is recording."""
        global _recording_thread
        if not _recording.acquire(blocking=False):  # another thread records
            return self._function(*call.args, **call.kwargs)
        try:
            _recording_thread = get_ident()
            roots = [("the function", self._function), *[("state", each) for each in self._state], *call.objects]
            if replayable is not None:
                self.checked += 1
                return specialization.check(self._function, call, roots, replayable)
            self.recorded += 1
            output, reason = specialization.record(self._function, call, roots)
        except Disagreement as found:
            raise self._error(found) from None
        finally:
            _recording_thread = 0
            _recording.release()
        self._tell_of_memory(call)
        if reason:
            self._tell(reason)
        self._note_obstacle(specialization, call)
        if self._obstacle and self.recorded >= MAX_ATTEMPTS and not self.skipped and not self._told:
            self._tell(self._obstacle, f"has run the code of {{}} in all of its {self.recorded} calls so far")
        return output

    def _error(self, found: Disagreement) -> CompileError:
        """The error of a check that disagrees."""
        code = getattr(self._function, "__code__", getattr(getattr(self._function, "forward", None), "__code__", None))
        place = f"{code.co_filename}:{code.co_firstlineno}: " if code and not re.match(r".+:\d+", str(found)) else ""
        wrong = ", whose results may be wrong" if found.skipped else ""
        return CompileError(
            f"{place}{found}. So the code of {self._title} does something else than was recorded: it depends on a "
            "Python value that gt.compile does not look at. Skipped since the last check that agreed: "
            f"{count(found.skipped, 'call')}{wrong}. Pass the value as an argument, or the object that holds it in "
            "state=; find the first call that differs with check_every=1; or leave out gt.compile"
        )

    @property
    def reasons(self) -> list[str]:
        """The reasons why calls were not skipped."""
        is_new = self._obstacle and self._obstacle not in self._told
        return [*self._told, self._obstacle] if is_new else list(self._told)

    def _note_obstacle(self, specialization: Specialization, call: CallArguments) -> None:
        """Note why the function is not skipped after its first calls."""
        before, self._last_arguments = self._last_arguments, describe_key(call.key)
        obstacle = specialization.obstacle
        if not obstacle and before and specialization.attempts == 1 and not specialization.replayable:
            differs = key_difference(before, self._last_arguments)
            obstacle = f"its arguments differ from call to call: {differs}"
        is_late = specialization.attempts >= _PATIENCE or (self.recorded >= _PATIENCE and not self.skipped)
        self._obstacle = obstacle if is_late else ""

    def _tell(self, reason: str, fact: str = "runs the code of {} in every call") -> None:
        """Warn once that calls run the code, and why."""
        if reason in self._told:
            return
        self._told.append(reason)
        warnings.warn(f"gt.compile {fact.format(self._title)}: {reason}", RuntimeWarning, stacklevel=5)

    def _tell_of_memory(self, call: CallArguments) -> None:
        """Warn once if a plan within a limit of memory does not count the arguments that the function holds."""
        model = registry.current().model
        limit = None if model is None else model.eager_memory
        nbytes = sum([moved._ref.storage.geometry.nbytes for _, moved in call.moved])
        if limit is None or nbytes <= _UNCOUNTED * limit or self._told_of_memory:
            return
        self._told_of_memory = True
        warnings.warn(
            f"gt.compile: {self._title} holds its plain arguments, {print_bytes(nbytes)}, until it ends, each whole on "
            f"one worker. The layouts were planned within {print_bytes(limit)} of memory for a step that is not "
            "compiled, and do not count that: pass the compiled function to gt.auto_shard, or call it with GT tensors",
            RuntimeWarning,
            stacklevel=5,
        )

    @property
    def _title(self) -> str:
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    def __set_name__(self, owner: type, name: str) -> None:
        self._is_method = True

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CompiledFunction[P, R]: ...

    @overload
    def __get__(
        self: CompiledFunction[Concatenate[Any, Rest], R], instance: object, owner: type | None = None
    ) -> Callable[Rest, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_function":
            raise AttributeError(name)
        return getattr(self._function, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction[P, R]:
        """A copy has recordings of its own."""
        return CompiledFunction(
            copy.deepcopy(self._function, memo), copy.deepcopy(self._state, memo), self._check_every
        )

    def __reduce__(self) -> Any:
        return CompiledFunction, (self._function, self._state, self._check_every)

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", None) or repr(self._function)
        return f"gt.compile({name}): {self.recorded} calls recorded, {self.checked} checked, {self.skipped} skipped"
