"""Hooks that drop the gathered copies of cut parameters when the module that used them has run, forward or backward.

Eager code does not know the last use of a tensor, but a module has an end. A copy is dropped when the forward of its
module ends; a gradient that needs it has it gathered again, and it is dropped when the backward of the next module
begins, or when backward ends. A module's backward begins with the autograd nodes of its outputs: a hook on a node
changes no tensor, as torch's full backward hooks do. Where a forward runs inside backward (checkpoints), nothing is
dropped, since its backward follows. Dropping a copy never changes a value: an op that needs it gathers it again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gt.client import scope_stack
from gt.client import session as sessions
from gt.client.storage import Storage
from gt.client.tensor import Tensor
from gt.client.torch_patches.autograd_nodes import NO_BACKWARD, call_after_backward, current_backward, current_node
from gt.client.torch_patches.pytree import tree_leaves
from gt.core.messages import DropCopies
from gt.signals.registry import registry


class ParameterPlace(NamedTuple):
    """The table of a module in which a parameter is, and its name there. The parameter may be replaced."""

    table: dict[str, Any]
    name: str


class CopyHook:
    """A forward hook of a module. `places` are its own cut parameters, `inner` the hooks of the modules inside it: a
    module may use the parameters of another one without calling it, as attention does."""

    def __init__(self, places: list[ParameterPlace]) -> None:
        self.places = places
        self.inner: frozenset[CopyHook] = frozenset()

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """`output` is None if the module has raised an exception."""
        if not _reshards():
            return
        nodes = {tensor.grad_fn for tensor in tree_leaves(output) if isinstance(tensor, Tensor)} - {None}
        for node in nodes:
            node.register_prehook(self._begin_backward)
        if current_node() is not None and (nodes or output is None):
            _running.note_recomputed(self)
        else:
            _drop([self])

    def _begin_backward(self, gradients: Any) -> None:
        _running.begin(self)

    def contains(self, other: CopyHook) -> bool:
        return other is self or other in self.inner

    def parameters(self) -> Iterator[Tensor]:
        """The cut parameters of the module and of those inside it."""
        for hook in (self, *self.inner):
            for table, name in hook.places:
                parameter = table.get(name)
                if isinstance(parameter, Tensor):
                    yield parameter


class _RunningBackward(threading.local):
    """The modules whose backward has begun and is not known to be over, and those whose forward was computed again for
    their backward, which is still to come. A thread has one; a backward inside another one shares it."""

    def __init__(self) -> None:
        self._begun: list[CopyHook] = []
        self._recomputed: set[CopyHook] = set()
        self._number = NO_BACKWARD

    def begin(self, hook: CopyHook) -> None:
        """The backward of a module begins, so that of the others is over, except for the modules around it."""
        self._follow()
        over = [other for other in self._begun if not other.contains(hook)]
        self._begun = [*[other for other in self._begun if other.contains(hook) and other is not hook], hook]
        self._recomputed.discard(hook)
        _drop(over)

    def note_recomputed(self, hook: CopyHook) -> None:
        """Keep copies for a backward that follows at once."""
        self._follow()
        if hook not in self._begun:
            self._recomputed.add(hook)

    def _follow(self) -> None:
        """Be called at the end of the backward that runs. One that raises is not ended: what is left of it goes with
        the next one."""
        number = current_backward()
        if number not in (self._number, NO_BACKWARD):
            self._number = number
            call_after_backward(self._end)

    def _end(self) -> None:
        over = [*self._begun, *self._recomputed]
        self._begun, self._recomputed, self._number = [], set(), NO_BACKWARD
        _drop(over)


_running = _RunningBackward()


def _reshards() -> bool:
    """What the innermost scope says that says something; true if none does."""
    frame = scope_stack.top()
    while frame is not None:
        config = registry.get(frame.name)
        if config is not None and config.reshard_after_forward is not None:
            return config.reshard_after_forward
        frame = frame.outer
    return True


def _drop(hooks: Iterable[CopyHook]) -> None:
    """Let the dispatcher drop the copies of the parameters of some modules."""
    session = sessions.active
    if session is None or session.closed_because:
        return
    found: dict[int, Storage] = {}
    for hook in hooks:
        for parameter in hook.parameters():
            storage = parameter._ref.storage
            if storage.session is session:
                found[id(storage)] = storage
    if found:
        session.outbox.submit(DropCopies, list(found.values()))
