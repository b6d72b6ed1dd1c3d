"""Hooks that tell the dispatcher when modules use their cut parameters: whole copies of them are gathered when a module
begins its forward or backward, and dropped when it has run.

Eager code does not know the last use of a tensor, but a module has an end. A copy is dropped when the forward of its
module ends. If a gradient needs it, it is gathered again, and dropped when the backward of the next module begins or
when backward ends. A module's backward begins with the autograd nodes of its outputs, so these nodes get hooks: unlike
torch's full backward hooks, they change no tensor. Where a forward runs inside backward (checkpoints), nothing is
dropped, since its backward follows. What is computed of a parameter alone, as its cast to another dtype, is cut as the
parameter is, and its copies are dropped with those of the parameter. Dropping a copy never changes a value: an op that
needs it gathers it again.

Modules mostly run in the same order each time, so messages also name the module that is likely to follow.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch

from gt.client import active_session, scope_stack
from gt.client.session import Session
from gt.client.storage import Storage
from gt.client.tensor import Tensor
from gt.client.torch_patches.autograd_nodes import NO_BACKWARD, call_after_backward, current_backward, current_node
from gt.client.torch_patches.dispatch import tree_leaves
from gt.core.messages import BeginModule, DropCopies
from gt.signals.registry import registry


class ParameterPlace(NamedTuple):
    """A parameter as the table of its module and its name in it, because the parameter itself may be replaced."""

    table: dict[str, Any]
    name: str


class ModulePass(enum.IntEnum):
    """A pass through a module."""

    FORWARD = 0
    BACKWARD = 1


class GatherHook:
    """The hooks of a module. `places` are its own cut parameters, `inner` the hooks of the modules inside it: a module
    may use the parameters of another one without calling it, as attention does. `following` are the hooks of the
    modules that ran after it last time, by pass."""

    _numbers = itertools.count(1)

    def __init__(self, places: list[ParameterPlace]) -> None:
        self.places = places
        self.inner: frozenset[GatherHook] = frozenset()
        self.following: dict[ModulePass, ref[GatherHook]] = {}
        self._number = next(self._numbers)

    def __getstate__(self) -> dict[str, Any]:
        return {"places": self.places, "inner": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The hook of a copied model has its own number and learns its own order."""
        self.__init__(state["places"])  # type: ignore[misc]
        self.inner = state["inner"]

    def number(self, module_pass: ModulePass) -> int:
        return 2 * self._number + module_pass

    def begin_forward(self, module: torch.nn.Module, args: Any) -> None:
        if self.places and _reshards():
            _order.begin(self, ModulePass.FORWARD)

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """The forward of the module has ended. `output` is None if it has raised an exception."""
        if not _reshards():
            return
        nodes = {tensor.grad_fn for tensor in tree_leaves(output) if isinstance(tensor, Tensor)} - {None}
        for node in nodes:
            node.register_prehook(self._begin_backward)
        if current_node() is not None and (nodes or output is None):
            _running.note_recomputed(self)
        else:
            _drop([self], kept=_order.expected())

    def _begin_backward(self, gradients: Any) -> None:
        _running.begin(self)
        if self.places:
            _order.begin(self, ModulePass.BACKWARD)

    def contains(self, other: GatherHook) -> bool:
        return other is self or other in self.inner

    def parameters(self) -> Iterator[Tensor]:
        """The cut parameters of the module and of those inside it."""
        for hook in (self, *self.inner):
            yield from hook.own_parameters()

    def own_parameters(self) -> Iterator[Tensor]:
        for table, name in self.places:
            parameter = table.get(name)
            if isinstance(parameter, Tensor):
                yield parameter


class _RunningBackward(threading.local):
    """The modules whose backward has begun and is not known to be over, and those whose forward was computed again for
    their backward, which is still to come. A thread has one; a backward inside another one shares it."""

    def __init__(self) -> None:
        self._begun: list[GatherHook] = []
        self._recomputed: set[GatherHook] = set()
        self._number = NO_BACKWARD

    def begin(self, hook: GatherHook) -> None:
        """The backward of a module begins, so that of the others is over, except for the modules around it, and for
        those inside it that have the same output."""
        self._follow()
        over = [other for other in self._begun if not other.contains(hook) and not hook.contains(other)]
        self._begun = [*[other for other in self._begun if other not in over and other is not hook], hook]
        self._recomputed.discard(hook)
        _drop(over)

    def note_recomputed(self, hook: GatherHook) -> None:
        """Keep the copies of a module whose forward was computed again: its backward follows immediately."""
        self._follow()
        if hook not in self._begun:
            self._recomputed.add(hook)

    def _follow(self) -> None:
        """Have `_end` called at the end of the backward that runs. It is not called for a backward that raises: the
        copies of that one are dropped with those of the next."""
        number = current_backward()
        if number not in (self._number, NO_BACKWARD):
            self._number = number
            call_after_backward(self._end)

    def _end(self) -> None:
        over = [*self._begun, *self._recomputed]
        self._begun, self._recomputed, self._number = [], set(), NO_BACKWARD
        _order.end(ModulePass.BACKWARD)
        _drop(over)


class _ModuleOrder(threading.local):
    """The module that began last in each pass, and the one that was expected to follow it. Holds weak references, so
    that the parameters of a model are freed with it."""

    def __init__(self) -> None:
        self._last: dict[ModulePass, ref[GatherHook]] = {}
        self._expected: ref[GatherHook] | None = None

    def begin(self, hook: GatherHook, module_pass: ModulePass) -> None:
        """Tell the dispatcher that a module begins. Its backward begins once for each output: only the first counts."""
        last = self._last[module_pass]() if module_pass in self._last else None
        if last is hook and module_pass is ModulePass.BACKWARD:
            return
        if last is not None and last is not hook:
            last.following[module_pass] = ref(hook)
        self._last[module_pass] = ref(hook)
        if module_pass is ModulePass.BACKWARD:
            self.end(ModulePass.FORWARD)  # the next forward does not follow this one
        self._forget_expected(hook)
        following = hook.following[module_pass]() if module_pass in hook.following else None
        if following is not None:
            self._expected = ref(following)
        _begin_module(hook, following, module_pass)

    def _forget_expected(self, hook: GatherHook) -> None:
        """Drop the copies that were gathered for a module, if another one has followed instead."""
        expected, self._expected = self.expected(), None
        if expected is not None and expected is not hook:
            _drop([expected])

    def expected(self) -> GatherHook | None:
        return self._expected() if self._expected is not None else None

    def end(self, module_pass: ModulePass) -> None:
        self._last.pop(module_pass, None)


_running = _RunningBackward()
_order = _ModuleOrder()


def _reshards() -> bool:
    """The `reshard_after_forward` of the innermost scope that sets it; True if none does."""
    frame = scope_stack.top()
    while frame is not None:
        config = registry.get(frame.name)
        if config is not None and config.reshard_after_forward is not None:
            return config.reshard_after_forward
        frame = frame.outer
    return True


def _drop(hooks: Iterable[GatherHook], kept: GatherHook | None = None) -> None:
    """Let the dispatcher drop the copies of the parameters of some modules, and of tensors computed of these alone,
    except parameters that `kept` has too."""
    session = _open_session()
    if session is None:
        return
    shared = _storages(session, kept.own_parameters()) if kept is not None else []
    found = _storages(session, itertools.chain.from_iterable(hook.parameters() for hook in hooks))
    parameters = [storage for storage in found if not any(storage is other for other in shared)]
    derived = {id(storage): storage for parameter in parameters for storage in parameter.live_derived()}
    if dropped := [*parameters, *derived.values()]:
        session.outbox.submit(DropCopies, dropped)


def _begin_module(hook: GatherHook, following: GatherHook | None, module_pass: ModulePass) -> None:
    """Tell the dispatcher that a module begins, and which one is likely to follow."""
    session = _open_session()
    if session is None:
        return
    own = _storages(session, hook.own_parameters())
    ahead = _storages(session, following.own_parameters()) if following is not None else []
    next_number = following.number(module_pass) if following is not None else 0
    site = session.sites.current()

    def begin(ids: tuple[int, ...]) -> BeginModule:
        return BeginModule(hook.number(module_pass), ids[: len(own)], next_number, ids[len(own) :], site)

    session.outbox.submit(begin, [*own, *ahead])


def _open_session() -> Session | None:
    session = active_session.active
    return None if session is None or session.closed_because else session


def _storages(session: Session, parameters: Iterable[Tensor]) -> list[Storage]:
    """The storages of parameters, each once; only those of a session."""
    found = {id(storage): storage for parameter in parameters if (storage := parameter._ref.storage).session is session}
    return list(found.values())
