"""A recorded call that GT repeats without its function, and the conditions under which it may."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from operator import attrgetter, is_
from typing import Any

import torch

from gt.client.compilation.argument_changes import containers_in
from gt.client.compilation.call_arguments import CallArguments, read_storage, sharing_pattern, unique_tensors
from gt.client.compilation.call_effects import CallTensors, content_of, read_ref, read_requires_grad, version_of
from gt.client.compilation.recorded_call import ReturnedContainer, Source
from gt.client.compilation.recording_attempt import RecordingAttempt, differ
from gt.client.compilation.replay_template import ReplayTemplate
from gt.client.compilation.scalar_plan import ScalarPlan, plan_scalars
from gt.client.compilation.watched_state import WatchedState
from gt.client.compilation.watched_values import Place
from gt.client.interrupts import CriticalSection
from gt.client.session import Session
from gt.client.storage import Storage
from gt.client.tensor import Tensor
from gt.client.torch_patches.dispatch import tree_unflatten

_GOLDEN_RATIO = (5**0.5 - 1) / 2
_read_key = attrgetter("key")


class ReplayableCall:
    """A recorded call that GT repeats in place of later calls to which it applies. `uses` counts these, and `skipped`
    those that did not run the code since the last check."""

    def __init__(
        self,
        attempts: Sequence[RecordingAttempt],
        earlier: Sequence[RecordingAttempt],
        ignored: Set[Place],
        check_every: int,
    ) -> None:
        last = attempts[-1]
        self._recorded = recorded = last.recorded
        self._check_every = check_every
        self.uses = 0
        self.skipped = 0
        self._watch(last, ignored)
        self._signatures = last.call.session.signatures
        assert last.keys is not None
        self._scalar_plan: ScalarPlan = plan_scalars(
            [attempt.recorded for attempt in (*earlier, *attempts)],
            last.keys,
            [attempt.steps for attempt in attempts],
            [attempt.trace for attempt in (*earlier, *attempts)],
        )
        self._template = ReplayTemplate(recorded, self._scalar_plan.groups, last.call.session)
        before = last.before
        self._others: list[Tensor] = last.others
        self._used_gradients = [each.positions[0] for each in recorded.sources if each.kind == "grad"]
        returned = any(isinstance(each, ReturnedContainer) for each in recorded.effects.results)
        found = containers_in(last.call.original_args, last.call.original_kwargs) if returned else ()
        self._containers = sharing_pattern(map(id, found))  # among the arguments; empty if none is a result
        self._plain = last.used_plain
        self._objects = last.state_objects()
        self._refs = list(map(read_ref, self._others))
        self._keys = list(map(_read_key, self._refs))
        self._storages = sharing_pattern([*before.storage_ids, *[before.gradients[n] for n in self._used_gradients]])
        self._requires_grad = list(map(read_requires_grad, self._others))
        sources = self._template.sources
        self._shared_operands = [
            each
            for each in sources
            if each.kind in ("plain", "constant") and len(each.positions) > (each.constant is None)
        ]
        self._constant_plain = _unchanged_plain(attempts)
        self._plain_versions = list(map(version_of, self._constant_plain))
        self._plain_contents = list(map(content_of, self._constant_plain))
        self._with_gradient = _seen_gradients([attempt.before for attempt in attempts])

    def _watch(self, attempt: RecordingAttempt, ignored: Set[Place]) -> None:
        """Look at the state that a call has left behind, but not at `ignored` places."""
        self.watched = WatchedState(attempt.watched.roots, attempt.touched, ignored)
        self._in_state = {id(tensor): tensor for tensor in self.watched.tensors}
        self._state_arguments = [tensor if id(tensor) in self._in_state else None for tensor in attempt.call.tensors]

    @property
    def is_due(self) -> bool:
        """Whether the next call is a check: the second, the third and one of each `check_every`. Their places vary, so
        that nothing in the program keeps step with them."""
        window, position = divmod(self.uses, self._check_every)
        last = self._check_every - 1
        return self.uses in (1, 2) or position == last - int(self._check_every * (window * _GOLDEN_RATIO % 1))

    def difference(self, attempt: RecordingAttempt) -> str | None:
        """How a call that this one fits, and that ran the code, differs from it; None if it does not."""
        recorded = attempt.recorded
        return (
            differ(attempt.state_objects(), self._objects)
            or recorded.difference(self._recorded, of_hints=False)
            or self._scalar_plan.difference(recorded.recording, attempt.keys, attempt.call.floats)
        )

    def confirm(self, attempt: RecordingAttempt, changed: Set[Place]) -> None:
        """Note that a call has run the code and has done the same. It does not depend on values that had `changed`
        before it, which are no longer looked at. If it depends on others that it changes itself, calls do not fit."""
        ignored = self.watched.ignored | changed
        if self.watched.changes() and {each.place for each in attempt.changes} <= ignored:
            self._watch(attempt, ignored)
        self.uses += 1
        self.skipped = 0

    def applies_to(self, call: CallArguments) -> bool:
        """Whether a call finds the state that the recorded call found, apart from the values of tensors and scalars."""
        return not self.watched.changes() and self.fits(call)

    def fits(self, call: CallArguments) -> bool:
        """Whether a call has the tensors, gradients and settings that the recorded call had. Prepares the scalars."""
        if call.session.signatures is not self._signatures:
            return False
        mine = [tensor if id(tensor) in self._in_state else None for tensor in call.tensors]
        if not all(map(is_, mine, self._state_arguments)) or not self._containers_match(call):
            return False
        others = self._others
        refs = list(map(read_ref, others))
        if not all(map(is_, refs, self._refs)):
            if not all(map(is_, map(_read_key, refs), self._keys)):
                return False
            self._refs = refs
        tensors = [*unique_tensors(call.tensors), *others]
        return (
            list(map(read_requires_grad, others)) == self._requires_grad
            and self._gradients_match(tensors)
            and self._sharing_pattern(tensors) == self._storages
            and self._operands_match(call.session)
            and self._scalar_plan.prepare(call.floats)
        )

    def run(self, call: CallArguments) -> Any:
        """Send the instructions of the recorded call, apply its effects, and return its results."""
        session, template = call.session, self._template
        tensors = [*unique_tensors(call.tensors), *self._others]
        containers = containers_in(call.original_args, call.original_kwargs) if self._containers else ()
        # Uploads may wait, and a critical section must not. The counts of optimizers are small, and known in it only.
        uploaded = [each.kind != "count" and self._external(session, each, tensors) for each in template.sources]
        with CriticalSection():  # an interrupt comes when the counts, the ops and the effects of a step are done
            scalars = self._scalar_plan.draw(call.floats)
            pairs = zip(template.sources, uploaded, strict=True)
            externals = [found or self._external(session, source, tensors) for source, found in pairs]
            template.reset_gradients(tensors)
            table = template.emit(session, externals, scalars)
            self._scalar_plan.commit(session, table)
            results = template.apply_effects(session, table, externals, tensors, containers)
        session.outbox.send_if_full()
        self.uses += 1
        self.skipped += 1
        if call.moved:
            results = list(map(call.original_tensor, results))
        return tree_unflatten(results, template.effects.structure)

    def _external(self, session: Session, source: Source, tensors: Sequence[Tensor]) -> Storage:
        """The storage that an external has in this call."""
        kind, positions, constant, _ = source
        if kind == "handle":
            return tensors[positions[0]]._ref.storage
        if constant is not None:
            return constant
        if kind == "grad":
            return tensors[positions[0]].grad._ref.storage  # type: ignore[union-attr]
        return session.upload_cache.storage_of(self._plain[positions[0]])

    def _operands_match(self, session: Session) -> bool:
        """Whether plain tensors that shared one content still do, and constant ones were not written to."""
        for _, positions, constant, _ in self._shared_operands:
            storages = {id(session.upload_cache.storage_of(self._plain[position])) for position in positions}
            if len(storages) > 1 or (constant is not None and storages != {id(constant)}):
                return False
        return self._constants_match()

    def _constants_match(self) -> bool:
        """Whether the plain tensors from which the function may compute constants have the recorded content."""
        versions = list(map(version_of, self._constant_plain))
        pairs = zip(versions, self._plain_versions, self._constant_plain, self._plain_contents, strict=True)
        for now, before, tensor, content in pairs:
            if now != before and (content is None or content_of(tensor) != content):
                return False
        self._plain_versions = versions
        return True

    def _containers_match(self, call: CallArguments) -> bool:
        """Whether containers that are returned are shared between arguments as in the recorded call."""
        if not self._containers:
            return True
        return sharing_pattern(map(id, containers_in(call.original_args, call.original_kwargs))) == self._containers

    def _sharing_pattern(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The pattern in which the tensors, and the gradients that the call uses, share storages."""
        gradients = [tensors[position].grad for position in self._used_gradients]
        return sharing_pattern(map(id, map(read_storage, [*tensors, *gradients])))

    def _gradients_match(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each tensor has a gradient, or none, as in one of the recorded calls."""
        for tensor, (without, present) in zip(tensors, self._with_gradient, strict=True):
            if tensor.is_leaf:
                gradient = tensor.grad
                if (gradient is None and not without) or (gradient is not None and gradient._ref.key not in present):
                    return False
        return True


def _seen_gradients(calls: Sequence[CallTensors]) -> list[tuple[bool, set[Any]]]:
    """For each tensor, whether it was without gradient before one of the calls, and the keys of its gradients."""
    return [
        (any(not each.gradients[position] for each in calls), {each.gradient_keys[position] for each in calls})
        for position in range(len(calls[0].gradients))
    ]


def _unchanged_plain(attempts: Sequence[RecordingAttempt]) -> list[torch.Tensor]:
    """The plain tensors whose content was the same in the recorded calls: the function may have computed constants from
    them. The others changed while the calls agreed, so that the calls do not depend on them."""
    first, last = attempts[0].before, attempts[-1].before
    found = {id(tensor): state for tensor, *state in _plain_states(first)}
    return [
        tensor
        for tensor, version, content in _plain_states(last)
        if id(tensor) not in last.counts
        and id(tensor) in found
        and (version == found[id(tensor)][0] or (content is not None and content == found[id(tensor)][1]))
    ]


def _plain_states(tensors: CallTensors) -> Iterator[tuple[torch.Tensor, int, bytes | None]]:
    return zip(tensors.plain, tensors.plain_versions, tensors.plain_contents, strict=True)
