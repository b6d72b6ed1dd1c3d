"""Steps of optimizers: the dispatcher is told where each begins and ends, and what the program itself holds of the
state of an optimizer, such as counters, is remembered from before each."""

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

from gt.client import session as sessions
from gt.client.session import Session
from gt.core.ids import session_of
from gt.core.messages import BeginStep, EndStep

REMEMBERED = 1 << 15  # entries of an optimizer's state, of all steps together that are remembered
FEWEST = 16  # steps that are remembered of every optimizer
_KEPT_ELEMENTS = 1 << 12  # of a plain tensor; larger ones are not remembered

ON_WORKERS, UNKNOWN = object(), object()  # in place of a value: a GT tensor; something that is not remembered
State: TypeAlias = dict[torch.Tensor, dict[str, Any]]


class Step:
    """`begin` and `end` are ids, which are given in the order of the program; `end` is 0 until the step has ended.
    `state` is that of the optimizer before it."""

    __slots__ = ("begin", "end", "state")

    def __init__(self, begin: int, state: State) -> None:
        self.begin = begin
        self.end = 0
        self.state = state


class History:
    """The last steps of an optimizer. `is_whole`: none was forgotten."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()
        self.is_whole = True
        self._entries = 0

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self._entries += 1 + len(step.state)
        while len(self.steps) > FEWEST and self._entries > REMEMBERED:
            self._entries -= 1 + len(self.steps.popleft().state)
            self.is_whole = False

    def after(self, moment: int) -> Step | None:
        """The first step that began after a moment."""
        return next((step for step in self.steps if step.begin > moment), None)

    def count_after(self, moment: int) -> int:
        return sum(step.begin > moment for step in self.steps)

    def knows(self, moment: int) -> bool:
        """Whether no step that began after a moment is forgotten."""
        return self.is_whole or moment >= self.steps[0].begin

    def forget_after(self, moment: int) -> None:
        while self.steps and self.steps[-1].begin > moment:
            self._entries -= 1 + len(self.steps.pop().state)


_histories: WeakKeyDictionary[Optimizer, History] = WeakKeyDictionary()


def histories(session: Session, optimizers: Sequence[Optimizer]) -> list[History]:
    """Of some optimizers, or of all where none is given, as far as they had steps in a session."""
    found = [_histories[optimizer] for optimizer in optimizers or list(_histories) if optimizer in _histories]
    return [history for history in found if history.steps and _is_of(history.steps[-1], session)]


def history_of(session: Session, optimizer: Optimizer) -> History | None:
    return next(iter(histories(session, [optimizer])), None)


def note_moment(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """The values of now are those to go back to, as at the end of a step."""
    for optimizer in optimizers:
        _add(session, optimizer, (), ())
    if not optimizers:
        _emit_begin(session, (), ())
    _end(session, optimizers)


def _is_of(step: Step, session: Session) -> bool:
    return session_of(step.begin) == session.welcome.ident


def _add(
    session: Session, optimizer: Optimizer, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> None:
    history = _histories.get(optimizer)
    if history is None or (history.steps and not _is_of(history.steps[-1], session)):
        history = _histories[optimizer] = History()
    history.add(Step(_emit_begin(session, gradients, parameters), remembered(optimizer)))


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
        _histories[optimizer].steps[-1].end = ended.step


def remembered(optimizer: Optimizer) -> State:
    """The state of an optimizer, but for GT tensors."""
    return {
        parameter: {name: _remembered(value) for name, value in entries.items()}
        for parameter, entries in optimizer.state.items()
        if isinstance(entries, dict)
    }


def _remembered(value: Any) -> Any:
    if hasattr(value, "_ref"):
        return ON_WORKERS
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.item()
        return value.detach().clone() if value.numel() <= _KEPT_ELEMENTS else UNKNOWN
    return value if value is None or isinstance(value, int | float | str) else UNKNOWN


def put_back(optimizer: Optimizer, state: State) -> None:
    """Give an optimizer the state that it had, but for GT tensors: what came since goes."""
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
    """The session in which an optimizer has tensors, if it has any."""
    session = sessions.active
    if session is None or session.closed:
        return None
    groups = optimizer.param_groups
    return session if any(hasattr(tensor, "_ref") for group in groups for tensor in group["params"]) else None


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    session = _session_of(optimizer)
    if session is None:
        return
    has_closure = any(value is not None for value in (*args[1:], kwargs.get("closure")))  # computes gradients itself
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"] if not has_closure]
    pairs = [(tensor.grad, tensor) for tensor in parameters if _is_ours(tensor) and _is_ours(tensor.grad)]
    _add(session, optimizer, [gradient for gradient, _ in pairs], [tensor for _, tensor in pairs])


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    session = _session_of(optimizer)
    history = _histories.get(optimizer)
    if session is not None and history is not None and history.steps and _is_of(history.steps[-1], session):
        _end(session, [optimizer])


def _is_ours(tensor: Any) -> bool:
    ref = getattr(tensor, "_ref", None)
    return ref is not None and ref.session is sessions.active


def follow_steps() -> None:
    """From now on all optimizers tell of their steps."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
