"""Hooks around the steps of optimizers: they tell the dispatcher where each step begins and ends, and snapshot the part
of an optimizer's state that is in this process, such as step counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gt.client import active_session
from gt.client.parameter_layouts import lay_out_new_state, note_optimizer
from gt.client.session import Session
from gt.core.ids import session_of
from gt.core.messages import BeginStep, EndStep

MAX_ENTRIES = 1 << 15  # entries of an optimizer's state, in all its snapshots
MIN_STEPS = 16  # kept for every optimizer, however large its state is
_MAX_ELEMENTS = 1 << 12  # elements of a plain tensor in a snapshot

ON_WORKERS, NOT_KEPT = object(), object()  # they replace a GT tensor in a snapshot, and a value that is not kept
OptimizerState: TypeAlias = dict[torch.Tensor, dict[str, Any]]


class OptimizerStep:
    """A step of an optimizer. `begin` and `end` are ids, which increase in program order; `end` is 0 until it has
    ended. `state` is a snapshot from before the step."""

    __slots__ = ("begin", "end", "state")

    def __init__(self, begin: int, state: OptimizerState) -> None:
        self.begin = begin
        self.end = 0
        self.state = state


class StepHistory:
    """The last steps of an optimizer. `is_complete`: none was dropped."""

    def __init__(self) -> None:
        self.steps: deque[OptimizerStep] = deque()
        self.is_complete = True
        self._entries = 0

    def add(self, step: OptimizerStep) -> None:
        self.steps.append(step)
        self._entries += 1 + len(step.state)
        while len(self.steps) > MIN_STEPS and self._entries > MAX_ENTRIES:
            self._entries -= 1 + len(self.steps.popleft().state)
            self.is_complete = False

    def first_after(self, point: int) -> OptimizerStep | None:
        """The first step that began after a point of the program, which is an id."""
        return next((step for step in self.steps if step.begin > point), None)

    def count_after(self, point: int) -> int:
        return sum(step.begin > point for step in self.steps)

    def reaches(self, point: int) -> bool:
        """Whether the history has all steps that began after a point."""
        return self.is_complete or point >= self.steps[0].begin

    def drop_after(self, point: int) -> None:
        while self.steps and self.steps[-1].begin > point:
            self._entries -= 1 + len(self.steps.pop().state)


_histories: WeakKeyDictionary[Optimizer, StepHistory] = WeakKeyDictionary()


def histories(session: Session, optimizers: Sequence[Optimizer]) -> list[StepHistory]:
    """The histories of some optimizers, or of all if none is given, that have steps in a session."""
    found = [_histories[optimizer] for optimizer in optimizers or list(_histories) if optimizer in _histories]
    return [history for history in found if history.steps and _belongs_to(history.steps[-1], session)]


def history_of(session: Session, optimizer: Optimizer) -> StepHistory | None:
    return next(iter(histories(session, [optimizer])), None)


def record_point(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """Record an empty step, so that gt.recover can return to the present values."""
    for optimizer in optimizers:
        _begin(session, optimizer, (), ())
    if not optimizers:
        _emit_begin(session, (), ())
    _end(session, optimizers)


def _belongs_to(step: OptimizerStep, session: Session) -> bool:
    return session_of(step.begin) == session.welcome.ident


def _begin(
    session: Session, optimizer: Optimizer, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> None:
    history = _histories.get(optimizer)
    if history is None or (history.steps and not _belongs_to(history.steps[-1], session)):
        history = _histories[optimizer] = StepHistory()
    history.add(OptimizerStep(_emit_begin(session, gradients, parameters), snapshot(optimizer)))


def _emit_begin(session: Session, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> int:
    site, count = session.sites.current(), len(gradients)
    storages = [tensor._ref.storage for tensor in (*gradients, *parameters)]  # type: ignore[attr-defined]
    begun: BeginStep = session.outbox.submit(
        lambda ids: BeginStep(next(session.ids), ids[:count], ids[count:], site), storages
    )
    return begun.step


def _end(session: Session, optimizers: Sequence[Optimizer]) -> None:
    ended: EndStep = session.outbox.submit(lambda ids: EndStep(next(session.ids)), ())
    for optimizer in optimizers:
        _histories[optimizer].steps[-1].end = ended.end


def note_step(session: Session, optimizer: Optimizer, begin: int, end: int, state: OptimizerState) -> None:
    """Add a step to the history of an optimizer whose instructions were repeated by gt.compile."""
    history = _histories.get(optimizer)
    if history is None or (history.steps and not _belongs_to(history.steps[-1], session)):
        history = _histories[optimizer] = StepHistory()
    history.add(OptimizerStep(begin, state))
    history.steps[-1].end = end


def optimizer_of_step(begin: int) -> Optimizer | None:
    """The optimizer that began a step, among its last ones. Ids begin anew in each session, so the newest optimizer is
    asked first."""
    for optimizer, history in reversed(list(_histories.items())):
        if any(step.begin == begin for step in history.steps):
            return optimizer
    return None


def snapshot(optimizer: Optimizer) -> OptimizerState:
    """A copy of an optimizer's state, without GT tensors."""
    return {
        parameter: {name: copy_of(value) for name, value in entries.items()}
        for parameter, entries in optimizer.state.items()
        if isinstance(entries, dict)
    }


def copy_of(value: Any) -> Any:
    """An entry of an optimizer's state for a snapshot."""
    if hasattr(value, "_ref"):
        return ON_WORKERS
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.item()
        return value.detach().clone() if value.numel() <= _MAX_ELEMENTS else NOT_KEPT
    return value if value is None or isinstance(value, int | float | str) else NOT_KEPT


def restore_state(optimizer: Optimizer, state: OptimizerState) -> None:
    """Give an optimizer the state of a snapshot, without its GT tensors; entries that are not in it are deleted."""
    for parameter in [parameter for parameter in optimizer.state if parameter not in state]:
        del optimizer.state[parameter]
    for parameter, before in state.items():
        entries = optimizer.state[parameter]
        for name in [name for name in entries if name not in before]:
            del entries[name]
        for name, value in before.items():
            if value is ON_WORKERS:
                continue
            if isinstance(entries[name], torch.Tensor):
                with torch.no_grad():
                    entries[name].copy_(torch.as_tensor(value))
            else:
                entries[name] = value


def _session_of(optimizer: Optimizer) -> Session | None:
    """The active session, if an optimizer has parameters on GT."""
    session = active_session.active
    if session is None or session.closed_because:
        return None
    groups = optimizer.param_groups
    return session if any(hasattr(tensor, "_ref") for group in groups for tensor in group["params"]) else None


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    note_optimizer(optimizer)
    session = _session_of(optimizer)
    if session is None:
        return
    lay_out_new_state(optimizer)
    has_closure = any(
        value is not None for value in (*args[1:], kwargs.get("closure"))
    )  # a closure computes gradients itself
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"] if not has_closure]
    pairs = [(tensor.grad, tensor) for tensor in parameters if _is_on_gt(tensor) and _is_on_gt(tensor.grad)]
    _begin(session, optimizer, [gradient for gradient, _ in pairs], [tensor for _, tensor in pairs])


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    session = _session_of(optimizer)
    if session is None:
        return
    history = _histories.get(optimizer)
    if history is not None and history.steps and _belongs_to(history.steps[-1], session):
        _end(session, [optimizer])
    lay_out_new_state(optimizer)


def _is_on_gt(tensor: Any) -> bool:
    ref = getattr(tensor, "_ref", None)
    return ref is not None and ref.session is active_session.active


def register_step_hooks() -> None:
    """Follow the steps of all optimizers from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
