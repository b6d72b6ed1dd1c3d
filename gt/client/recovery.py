"""After a failure: tensors get back the values that they had at one moment of the program."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from gt.client import optimizer_steps
from gt.client.call_cache import wrap
from gt.client.factory_mode import FactoryMode
from gt.client.optimizer_steps import ON_WORKERS, UNKNOWN, History, Step
from gt.client.session import Session
from gt.client.storage import Storage
from gt.client.tensor import Tensor
from gt.core.errors import GTError, RecoveryError, WorkerLost
from gt.core.messages import CURRENT, FORMER, KEPT, Span
from gt.core.meta import contiguous_strides

log = logging.getLogger("gt.client")

_NAMED = 8  # tensors that an error names


class Owner(NamedTuple):
    """The entry of an optimizer's state that is a tensor."""

    optimizer: Optimizer
    parameter: torch.Tensor
    name: str


class Target(NamedTuple):
    """A tensor to bring back, and the values of it that can be had. `owner`: where it is found, if in an optimizer."""

    name: str
    storage: Storage
    span: Span
    is_parameter: bool
    owner: Owner | None

    def version(self, moment: int) -> int | None:
        """Which of the values is that of a moment of the program."""
        span = self.span
        if span.since and span.since <= moment and (not span.until or moment < span.until):
            return FORMER
        return KEPT if span.kept_since and span.kept_since <= moment < span.kept_until else None


class Moment(NamedTuple):
    """A moment of the program that tensors may go back to: what has to be brought back for it, what cannot be, and the
    first step after it of each optimizer."""

    at: int
    versions: list[tuple[Target, int]]
    missing: list[str]
    after: list[tuple[Optimizer, Step]]


def recover(*targets: torch.Tensor | torch.nn.Module | Optimizer) -> None:
    """Give tensors back the values that they had at the end of a step, where a later step has failed: an op of it
    failed, or a worker was lost. All of them are of the same step, or RecoveryError is raised and nothing has changed.

    Takes tensors, modules (parameters and buffers) and optimizers (parameters and state, with counters). Where no
    optimizer has done a step, all values are of one moment of the program. Every value is read, and laid out anew over
    the workers that are there. Writes between that step and the failed one are dropped, with a warning that names their
    tensors. Gradients without a value become None.
    """
    _require_on_workers(targets)
    optimizers = [target for target in targets if isinstance(target, Optimizer)]
    found: dict[int, tuple[str, Storage, Owner | None]] = {}
    for name, storage, owner in [entry for target in targets for entry in _tensors(target)]:
        found.setdefault(id(storage), (name, storage, owner))  # a parameter of a module has its name there
    for session in {storage.session for _, storage, _ in found.values()}:
        with contextlib.suppress(WorkerLost):  # so that the dispatcher knows who is gone
            session.wait_for_work()
        spans = session.read_versions([storage for _, storage, _ in found.values()])
        parameters = {id(parameter._ref.storage) for target in targets for parameter in _parameters(target)}
        known = [
            Target(name, storage, span, id(storage) in parameters, owner)
            for (name, storage, owner), span in zip(found.values(), spans, strict=True)
        ]
        _go_back(session, known, optimizers)
        _drop_gradients(session, [parameter for target in targets for parameter in _parameters(target)])


def _require_on_workers(targets: Sequence[Any]) -> None:
    """Raises where a target has plain tensors, which GT cannot bring back, or where there is nothing to bring back. The
    state of an optimizer may be plain: its history has it."""
    if not targets:
        raise TypeError(
            "gt.recover needs the tensors, modules and optimizers to bring back: gt.recover(model, optimizer)"
        )
    entries = [entry for target in targets for entry in _named(target)]
    plain = [name for name, tensor, owner in entries if owner is None and _is_plain(tensor)]
    if plain:
        raise RecoveryError(
            f"gt.recover cannot bring back {_listed(plain)}: not on GT, so their values before the failed step are not "
            f"known. Nothing was changed. Move whole modules with gt.to(module) before training, or give only what is "
            f"on GT and set the rest yourself."
        )
    if not any(isinstance(tensor, Tensor) for _, tensor, _ in entries):
        kinds = ", ".join(type(target).__name__ for target in targets)
        raise RecoveryError(f"gt.recover was given {kinds}, without any tensor on GT; there is nothing to bring back")


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor has a value, in this process."""
    return isinstance(tensor, torch.Tensor) and not hasattr(tensor, "_ref") and not is_lazy(tensor)


def _go_back(session: Session, targets: Sequence[Target], optimizers: Sequence[Optimizer]) -> None:
    moment = _last_moment(session, targets, optimizers)
    try:
        values = [(target.storage, session.fetch(target.storage, version)) for target, version in moment.versions]
    except GTError as error:
        raise RecoveryError(f"gt.recover cannot read what it would bring back; load a checkpoint. {error}") from error
    for storage, value in values:
        _put_back(storage, value)
    for optimizer, step in moment.after:
        optimizer_steps.put_back(optimizer, step.state)
    past = optimizer_steps.histories(session, optimizers)
    _warn_of_dropped_writes(moment, past)
    for history in past:
        history.forget_after(moment.at)
    if past:
        optimizer_steps.note_moment(session, optimizers)


def _warn_of_dropped_writes(moment: Moment, histories: Sequence[History]) -> None:
    """A kept version is used where a tensor was written after the end of the step."""
    dropped = [target.name for target, version in moment.versions if version == KEPT]
    if dropped:
        later = max([history.count_after(moment.at) for history in histories], default=0)
        log.warning(
            "gt.recover went back to the end of the last optimizer step that was done, %d before the present one; what "
            "was written after it is dropped of %s. Repeat such writes, or do them before optimizer.step()",
            later,
            _listed(dropped),
        )


def _drop_gradients(session: Session, parameters: Sequence[Tensor]) -> None:
    """Gradients without a value would fail every step that adds to them."""
    with_gradients = [parameter for parameter in parameters if isinstance(parameter.grad, Tensor)]
    spans = session.read_versions([parameter.grad._ref.storage for parameter in with_gradients])  # type: ignore[union-attr]
    for parameter, span in zip(with_gradients, spans, strict=True):
        if not span.since or span.until:
            parameter.grad = None


# Moments


def _last_moment(session: Session, targets: Sequence[Target], optimizers: Sequence[Optimizer]) -> Moment:
    """The last moment whose values can all be had. Raises RecoveryError where there is none."""
    histories = optimizer_steps.histories(session, optimizers)
    tried = [_moment(session, at, targets, optimizers) for at in _moments(session, targets, histories)]
    found = next((moment for moment in tried if not moment.missing), None)
    if found is not None:
        return found
    nearest = min(tried, key=lambda moment: len(moment.missing), default=Moment(0, [], [t.name for t in targets], []))
    raise RecoveryError(_explanation(nearest.missing, len(targets))) from _cause(session, targets)


def _moments(session: Session, targets: Sequence[Target], histories: Sequence[History]) -> list[int]:
    """Moments at which no step was under way, the last one first: now, the ends of steps, and before the first step."""
    spans = [target.span for target in targets]
    since = max([span.since for span in spans], default=0)
    if not histories or len(targets) == 1:
        return [since]
    ends = [step.end for history in histories for step in history.steps if step.end]
    if all(history.steps[-1].end for history in histories):
        ends.append(next(session.ids))
    if all(history.is_whole for history in histories):
        # Parameters and state have had their values since before the first step, if they have them still.
        first = min([history.steps[0].begin for history in histories])
        there = [target.span.since for target in targets if target.is_parameter or _is_older(target, histories)]
        start = max(there, default=first)
        ends += [start] if start < first else []
    return sorted(ends, reverse=True)


def _moment(session: Session, at: int, targets: Sequence[Target], optimizers: Sequence[Optimizer]) -> Moment:
    after: list[tuple[Optimizer, Step]] = []
    missing: list[str] = []
    for optimizer in optimizers:
        history = optimizer_steps.history_of(session, optimizer)
        step = history.after(at) if history is not None else None
        if step is not None:
            after.append((optimizer, step))
            missing += [f"state {name!r}" for name in _changed(optimizer, step)]
        if history is not None and not history.knows(at):
            missing.append(f"the state of {type(optimizer).__name__} so many steps ago")
    there = [target for target in targets if _is_there(target, after)]
    versions = [(target, version) for target in there if (version := target.version(at)) is not None]
    had = {id(target.storage) for target, _ in versions}
    return Moment(at, versions, missing + [target.name for target in there if id(target.storage) not in had], after)


def _is_older(target: Target, histories: Sequence[History]) -> bool:
    """Whether a tensor is of the state that optimizers had before their first step."""
    owner = target.owner
    return owner is not None and any(
        owner.name in history.steps[0].state.get(owner.parameter, {}) for history in histories
    )


def _is_there(target: Target, after: Sequence[tuple[Optimizer, Step]]) -> bool:
    """Whether a tensor was there before the first step after a moment: state that came in that step goes again."""
    if target.owner is None:
        return True
    states = [step.state for optimizer, step in after if optimizer is target.owner.optimizer]
    return all(target.owner.name in state.get(target.owner.parameter, {}) for state in states)


def _changed(optimizer: Optimizer, step: Step) -> list[str]:
    """Entries of an optimizer's state that were not remembered, or are not what they were."""
    return [
        name
        for parameter, before in step.state.items()
        for name, value in before.items()
        if value is UNKNOWN
        or name not in optimizer.state.get(parameter, {})
        or (value is ON_WORKERS and not hasattr(optimizer.state[parameter][name], "_ref"))
    ]


def _explanation(missing: Sequence[str], total: int) -> str:
    return (
        f"gt.recover cannot bring {total} tensors back to one step: of {_listed(missing)} no value before the failed "
        f"step is left (they were written since, or lost with a worker). Nothing was changed. Load a checkpoint."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _cause(session: Session, targets: Sequence[Target]) -> GTError | None:
    """The error of the first tensor without a value."""
    for target in targets:
        if not target.span.since or target.span.until:
            try:
                session.fetch(target.storage, CURRENT)
            except GTError as error:
                return error
    return None


# Tensors


def _tensors(target: Any) -> Iterator[tuple[str, Storage, Owner | None]]:
    """The GT tensors of a tensor, a module or an optimizer, with names."""
    owner: Owner | None
    for name, tensor, owner in _named(target):
        if isinstance(tensor, Tensor):
            yield name, tensor._ref.storage, owner


def _named(target: Any) -> Iterator[tuple[str, Any, Owner | None]]:
    if isinstance(target, torch.nn.Module):
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            yield name, tensor, None
    elif isinstance(target, Optimizer):
        places = {tensor: number for number, tensor in enumerate(_of_groups(target))}
        for tensor, number in places.items():
            yield f"parameter {number}", tensor, None
        for tensor, entries in target.state.items():
            for name, value in entries.items() if isinstance(entries, dict) else ():
                yield f"{name} of parameter {places.get(tensor, '?')}", value, Owner(target, tensor, name)
    elif isinstance(target, torch.Tensor):
        yield "a tensor", target, None
    else:
        raise TypeError(f"gt.recover takes tensors, modules and optimizers, not {type(target).__name__}")


def _parameters(target: Any) -> Iterator[Tensor]:
    tensors: Sequence[Any] = ()
    if isinstance(target, torch.nn.Module):
        tensors = list(target.parameters())
    elif isinstance(target, Optimizer):
        tensors = _of_groups(target)
    return (tensor for tensor in tensors if isinstance(tensor, Tensor))


def _of_groups(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _put_back(storage: Storage, value: torch.Tensor) -> None:
    """All handles and views of a tensor stand for the new one; what it was is freed with the record of it."""
    session = storage.session
    fresh = session.upload(value, is_operand=True)
    if storage.geometry.stride != contiguous_strides(tuple(storage.geometry.shape)):
        with torch.no_grad(), FactoryMode(Tensor):
            strided = torch.empty_strided(storage.geometry.shape, storage.geometry.stride, dtype=storage.geometry.dtype)
            fresh = strided.copy_(wrap(Tensor, fresh))._ref.storage  # type: ignore[attr-defined]
    with contextlib.suppress(GTError):  # it may lie nowhere any more: the first op that needs it says where
        fresh = session.redistribute(fresh, session.locate(storage))
    session.outbox.swap_ids(storage, fresh)
