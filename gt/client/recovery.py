"""`gt.recover`: after a failure, restores tensors to the values that they had at one point of the program."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from gt.client import optimizer_step_hooks
from gt.client.cached_calls import wrap
from gt.client.factory_mode import FactoryMode
from gt.client.optimizer_step_hooks import NOT_KEPT, ON_WORKERS, OptimizerStep, StepHistory
from gt.client.session import Session
from gt.client.session_reads import fetch, locate, read_versions
from gt.client.storage import Storage
from gt.client.tensor import Handle, Tensor
from gt.core.errors import GTError, RecoveryError, WorkerLost
from gt.core.messages import CURRENT, KEPT, PREVIOUS, VersionSpan, hosts_of
from gt.sharding.spec import ShardingSpec
from gt.signals.checks import ALL
from gt.signals.registry import registry
from gt.signals.resolution import readings_without

log = logging.getLogger("gt.client")

_MAX_NAMES = 8  # tensors that an error names


class StateEntry(NamedTuple):
    """An entry of an optimizer's state."""

    optimizer: Optimizer
    parameter: torch.Tensor
    name: str


class RecoveryTarget(NamedTuple):
    """A tensor to restore, and the span of its values that can be read. `entry`: the entry of an optimizer's state that
    it is, if any."""

    name: str
    storage: Storage
    span: VersionSpan
    is_parameter: bool
    entry: StateEntry | None

    def version(self, point: int) -> int | None:
        """The version of the value that it had at a point of the program, or None if that cannot be read."""
        span = self.span
        if span.since and span.since <= point and (not span.until or point < span.until):
            return PREVIOUS
        return KEPT if span.kept_since and span.kept_since <= point < span.kept_until else None


class RecoveryPoint(NamedTuple):
    """A point of the program to go back to, which is an id: the versions of tensors to restore, the names of values
    that cannot be restored, and the first step of each optimizer after it."""

    at: int
    versions: list[tuple[RecoveryTarget, int]]
    missing: list[str]
    after: list[tuple[Optimizer, OptimizerStep]]


def recover(*targets: torch.Tensor | torch.nn.Module | Optimizer) -> None:
    """Restore tensors to the values that they had at the end of a step, if a later step has failed: an op of it
    failed, or a worker was lost. All values are of the same step, or RecoveryError is raised and nothing has changed.

    Takes tensors, modules (parameters and buffers) and optimizers (parameters and state, with counters). Where no
    optimizer has done a step, all values are of one point of the program. Every value is read, and laid out anew over
    the connected workers. Writes between that step and the failed one are dropped, with a warning that names
    their tensors. Gradients without a value become None.

    >>> model = gt.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step(rows):
    ...     optimizer.zero_grad()
    ...     model(gt.ones(3, 2)[gt.tensor(rows)]).sum().backward()
    ...     optimizer.step()
    >>> step([0, 1])
    >>> before = model.weight.tolist()
    >>> step([7])  # out of range: a worker finds out later
    >>> try:
    ...     model.weight.tolist()
    ... except (gt.OpError, gt.WorkerLost):
    ...     gt.recover(model, optimizer)
    >>> model.weight.tolist() == before
    True
    """
    _require_on_workers(targets)
    optimizers = [target for target in targets if isinstance(target, Optimizer)]
    found: dict[int, tuple[str, Storage, StateEntry | None]] = {}
    for name, storage, entry in [named for target in targets for named in _tensors(target)]:
        found.setdefault(id(storage), (name, storage, entry))  # under its name in a module, if that comes first
    for session in {storage.session for _, storage, _ in found.values()}:
        with contextlib.suppress(WorkerLost):  # so that the dispatcher has noted lost workers
            session.wait_for_work()
        spans = read_versions(session, [storage for _, storage, _ in found.values()])
        parameters = {id(parameter._ref.storage) for target in targets for parameter in _parameters(target)}
        known = [
            RecoveryTarget(name, storage, span, id(storage) in parameters, entry)
            for (name, storage, entry), span in zip(found.values(), spans, strict=True)
        ]
        try:
            _recover_session(session, known, optimizers)
        finally:
            _tell_of_missing_workers(session)  # after reads, which tell the session of the workers that are left
        _drop_gradients(session, [parameter for target in targets for parameter in _parameters(target)])


def _tell_of_missing_workers(session: Session) -> None:
    """Say how the configuration reads for the workers that are left, if it names others."""
    for subject, reading in readings_without(registry.current(), hosts_of(session.workers)):
        log.warning(
            "%s needs workers that are not there; for those that are left it reads `%s`, for any number `workers: %s`",
            subject,
            reading,
            ALL,
        )


def _require_on_workers(targets: Sequence[Any]) -> None:
    """Raise if a target has plain tensors, which GT cannot restore, or if no target has a tensor on GT. The state of an
    optimizer may be plain, since its history has snapshots of it."""
    if not targets:
        raise TypeError(
            "gt.recover needs the tensors, modules and optimizers to bring back: gt.recover(model, optimizer)"
        )
    entries = [entry for target in targets for entry in _named_tensors(target)]
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


def _recover_session(session: Session, targets: Sequence[RecoveryTarget], optimizers: Sequence[Optimizer]) -> None:
    """Restore the tensors and optimizers of one session to the last point that can be read."""
    point = _last_point(session, targets, optimizers)
    try:
        values = [(target.storage, fetch(target.storage, version)) for target, version in point.versions]
    except GTError as error:
        raise RecoveryError(f"gt.recover cannot read what it would bring back; load a checkpoint. {error}") from error
    for storage, value in values:
        _restore(storage, value)
    for optimizer, step in point.after:
        optimizer_step_hooks.restore_state(optimizer, step.state)
    past = optimizer_step_hooks.histories(session, optimizers)
    _warn_of_dropped_writes(point, past)
    for history in past:
        history.drop_after(point.at)
    if past:
        optimizer_step_hooks.record_point(session, optimizers)


def _warn_of_dropped_writes(point: RecoveryPoint, histories: Sequence[StepHistory]) -> None:
    """Warn of tensors whose writes since the end of the step are dropped: a kept value was restored."""
    dropped = [target.name for target, version in point.versions if version == KEPT]
    if dropped:
        later = max([history.count_after(point.at) for history in histories], default=0)
        log.warning(
            "gt.recover went back to the end of the last optimizer step that was done, %d before the present one; what "
            "was written after it is dropped of %s. Repeat such writes, or do them before optimizer.step()",
            later,
            _listed(dropped),
        )


def _drop_gradients(session: Session, parameters: Sequence[Tensor]) -> None:
    """Set gradients without a value to None: a later backward would add to them and fail."""
    with_gradients = [parameter for parameter in parameters if isinstance(parameter.grad, Tensor)]
    spans = read_versions(session, [parameter.grad._ref.storage for parameter in with_gradients])  # type: ignore[union-attr]
    for parameter, span in zip(with_gradients, spans, strict=True):
        if not span.since or span.until:
            parameter.grad = None


# Points


def _last_point(session: Session, targets: Sequence[RecoveryTarget], optimizers: Sequence[Optimizer]) -> RecoveryPoint:
    """The last point whose values can all be read. Raises RecoveryError if there is none."""
    histories = optimizer_step_hooks.histories(session, optimizers)
    points = [_point_at(session, at, targets, optimizers) for at in _candidates(session, targets, histories)]
    found = next((point for point in points if not point.missing), None)
    if found is not None:
        return found
    nearest = min(
        points, key=lambda point: len(point.missing), default=RecoveryPoint(0, [], [t.name for t in targets], [])
    )
    raise RecoveryError(_explanation(nearest.missing, len(targets), bool(optimizers))) from _cause(session, targets)


def _candidates(session: Session, targets: Sequence[RecoveryTarget], histories: Sequence[StepHistory]) -> list[int]:
    """Points at which no step was running, the last one first: now, the ends of steps, and before the first step."""
    spans = [target.span for target in targets]
    since = max([span.since for span in spans], default=0)
    if not histories or len(targets) == 1:
        return [since]
    ends = [step.end for history in histories for step in history.steps if step.end]
    if all(history.steps[-1].end for history in histories):
        ends.append(next(session.ids))
    if all(history.is_complete for history in histories):
        # The values from before the first step are still the latest ones of parameters and state that have any.
        first = min([history.steps[0].begin for history in histories])
        starts = [target.span.since for target in targets if target.is_parameter or _precedes_steps(target, histories)]
        start = max(starts, default=first)
        ends += [start] if start < first else []
    return sorted(ends, reverse=True)


def _point_at(
    session: Session, at: int, targets: Sequence[RecoveryTarget], optimizers: Sequence[Optimizer]
) -> RecoveryPoint:
    """The recovery point at an id, with the names of the values that cannot be restored."""
    after: list[tuple[Optimizer, OptimizerStep]] = []
    missing: list[str] = []
    for optimizer in optimizers:
        history = optimizer_step_hooks.history_of(session, optimizer)
        step = history.first_after(at) if history is not None else None
        if step is not None:
            after.append((optimizer, step))
            missing += [f"state {name!r}" for name in _lost_entries(optimizer, step)]
        if history is not None and not history.reaches(at):
            missing.append(f"the state of {type(optimizer).__name__} so many steps ago")
    existing = [target for target in targets if _existed(target, after)]
    versions = [(target, version) for target in existing if (version := target.version(at)) is not None]
    readable = {id(target.storage) for target, _ in versions}
    return RecoveryPoint(
        at, versions, missing + [target.name for target in existing if id(target.storage) not in readable], after
    )


def _precedes_steps(target: RecoveryTarget, histories: Sequence[StepHistory]) -> bool:
    """Whether a tensor is in the state that optimizers had before their first step."""
    entry = target.entry
    return entry is not None and any(
        entry.name in history.steps[0].state.get(entry.parameter, {}) for history in histories
    )


def _existed(target: RecoveryTarget, after: Sequence[tuple[Optimizer, OptimizerStep]]) -> bool:
    """Whether a tensor existed before the first step after a point: state that the step made is deleted again."""
    if target.entry is None:
        return True
    states = [step.state for optimizer, step in after if optimizer is target.entry.optimizer]
    return all(target.entry.name in state.get(target.entry.parameter, {}) for state in states)


def _lost_entries(optimizer: Optimizer, step: OptimizerStep) -> list[str]:
    """The names of entries of an optimizer's state that the snapshot does not have, or that are no GT tensors any
    more."""
    return [
        name
        for parameter, before in step.state.items()
        for name, value in before.items()
        if value is NOT_KEPT
        or name not in optimizer.state.get(parameter, {})
        or (value is ON_WORKERS and not hasattr(optimizer.state[parameter][name], "_ref"))
    ]


def _explanation(missing: Sequence[str], total: int, has_state: bool) -> str:
    weights = ", or try gt.recover(model) without its optimizer, whose state starts anew" if has_state else ""
    return (
        f"gt.recover cannot bring {total} tensors back to one step: of {_listed(missing)} no value before the failed "
        f"step is left (they were written since, or lost with a worker). Nothing was changed. Load a checkpoint"
        f"{weights}."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


def _cause(session: Session, targets: Sequence[RecoveryTarget]) -> GTError | None:
    """The error of the first tensor without a value."""
    for target in targets:
        if not target.span.since or target.span.until:
            try:
                fetch(target.storage, CURRENT)
            except GTError as error:
                return error
    return None


# Tensors


def _tensors(target: Any) -> Iterator[tuple[str, Storage, StateEntry | None]]:
    """The GT tensors of a tensor, a module or an optimizer, with names."""
    entry: StateEntry | None
    for name, tensor, entry in _named_tensors(target):
        if isinstance(tensor, Tensor):
            yield name, tensor._ref.storage, entry


def _named_tensors(target: Any) -> Iterator[tuple[str, Any, StateEntry | None]]:
    """The tensors of a tensor, module or optimizer, with their names and entries of state."""
    if isinstance(target, torch.nn.Module):
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            yield name, tensor, None
    elif isinstance(target, Optimizer):
        positions = {tensor: number for number, tensor in enumerate(_parameters_of(target))}
        for tensor, number in positions.items():
            yield f"parameter {number}", tensor, None
        for tensor, entries in target.state.items():
            for name, value in entries.items() if isinstance(entries, dict) else ():
                yield f"{name} of parameter {positions.get(tensor, '?')}", value, StateEntry(target, tensor, name)
    elif isinstance(target, torch.Tensor):
        yield "a tensor", target, None
    else:
        raise TypeError(f"gt.recover takes tensors, modules and optimizers, not {type(target).__name__}")


def _parameters(target: Any) -> Iterator[Tensor]:
    tensors: Sequence[Any] = ()
    if isinstance(target, torch.nn.Module):
        tensors = list(target.parameters())
    elif isinstance(target, Optimizer):
        tensors = _parameters_of(target)
    return (tensor for tensor in tensors if isinstance(tensor, Tensor))


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _restore(storage: Storage, value: torch.Tensor) -> None:
    """Upload a value in the layout of a storage and exchange its id with the storage's: all handles and views of the
    storage refer to the new value, and the old one is freed."""
    session = storage.session
    layout = None
    with contextlib.suppress(GTError):  # its layout may be lost: the first op that uses it places it
        layout = locate(storage)
    if value.stride() == storage.geometry.stride:
        fresh = session.upload(value, layout, is_operand=True)
    else:
        fresh = _upload_with_gaps(storage, value, layout)
    session.outbox.swap_ids(storage, fresh)


def _upload_with_gaps(storage: Storage, value: torch.Tensor, layout: ShardingSpec | None) -> Storage:
    """A value in memory with the strides of a storage, which leave gaps: workers write it there."""
    geometry = storage.geometry
    plain = storage.session.upload(value, is_operand=True)
    with torch.no_grad(), FactoryMode(Tensor):
        strided = torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype)
        fresh: Storage = strided.copy_(wrap(Handle, plain))._ref.storage  # type: ignore[attr-defined]
    return fresh if layout is None else storage.session.redistribute(fresh, layout)
