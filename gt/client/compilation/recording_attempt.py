"""One call of a compiled function that runs its Python code while GT records its instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from gt.client.compilation.argument_changes import ArgumentChanges
from gt.client.compilation.call_arguments import CallArguments, unique_tensors
from gt.client.compilation.call_effects import CallTensors, NotRepeatable, RecordedCallBuilder, version_of
from gt.client.compilation.call_recorder import CallRecorder, Recording
from gt.client.compilation.random_keys import plan_keys
from gt.client.compilation.recorded_call import RecordedCall
from gt.client.compilation.scalar_plan import StepScalars, same_scalar
from gt.client.compilation.traced_floats import FloatTrace
from gt.client.compilation.watched_state import WatchedState
from gt.client.tensor import Tensor


class RecordingAttempt:
    """One call of a function, recorded. `reason` tells why it cannot be repeated; it is empty if it can."""

    def __init__(
        self, call: CallArguments, roots: Sequence[tuple[str, object]], stepped: dict[int, list[Tensor]]
    ) -> None:
        self.call = call
        self.reason = ""
        self.watched = WatchedState(roots)
        arguments = {id(tensor) for tensor in call.tensors}
        self.others = [tensor for tensor in self.watched.tensors if id(tensor) not in arguments]
        optimizers = self.watched.optimizers
        counts = {id(value) for each in optimizers for entries in each.state.values() for value in entries.values()}
        self.before = CallTensors([*unique_tensors(call.tensors), *self.others], self.watched.plain, counts)
        self.steps = [StepScalars(optimizer, stepped.get(id(optimizer))) for optimizer in optimizers]
        self.trace = FloatTrace(call.floats)
        self.recorded: RecordedCall

    def run(self, function: Callable[..., Any]) -> Any:
        """Run the function, record its instructions and effects, and return its output."""
        arguments = ArgumentChanges(function, self.call, self.trace, self.others)
        try:
            with CallRecorder(self.call.session) as recording:
                output = function(*arguments.args, **arguments.kwargs)
                try:
                    builder = RecordedCallBuilder(recording, self.before, arguments)
                    output, templates, structure = builder.results(output, self.watched.known_ids)
                    self.recorded = builder.call(templates, structure)
                except NotRepeatable as error:
                    self.reason = str(error)
                    output = arguments.restored(output)
        finally:
            changed = arguments.apply()
        self.reason = self.watched.unknown or self.reason or changed or self._reason(recording)
        return output

    def _reason(self, recording: Recording) -> str:
        """The reason why the recording cannot be repeated, or an empty text."""
        for steps in self.steps:
            steps.align(self.recorded, self.before.tensors)
        if reason := recording.obstacle or recording.side_effect():
            return reason
        if changed := self.watched.change_in_call():
            return f"it changes {changed}, which a skipped call would not; change it outside of the function"
        for steps in self.steps:
            if setting := steps.changed_setting():
                return f"it sets {setting!r} of an optimizer, which a skipped call would not; set it outside"
            if steps.has_changed_counts():
                return "it counts the steps of an optimizer in a way that a skipped call would not"
        counted = {id(tensor) for steps in self.steps for tensor in steps.counts()}
        for tensor, version in zip(self.before.plain, self.before.plain_versions, strict=True):
            if id(tensor) not in counted and version_of(tensor) != version:
                if id(tensor) in self.before.counts:
                    return "GT cannot tell the numbers of an optimizer's next steps from those of the last ones"
                return "it writes to a plain tensor, which a skipped call would not; have that tensor on GT"
        self.keys = plan_keys(recording)
        if self.keys is None or self._draws_elsewhere(recording):
            return "it uses or sets torch's random generator for something else than ops on GT tensors"
        return ""

    def _draws_elsewhere(self, recording: Recording) -> bool:
        """Whether a generator of the program has given numbers to something else than ops on GT. Torch makes a new
        object for the generator of each op, so that generators are told by their states."""
        for generator, before in self.watched.generators:
            now = generator.get_state()
            draws = (each for each in recording.draws if torch.equal(each.state, before))
            if not torch.equal(now, before) and not any(torch.equal(each.generator.get_state(), now) for each in draws):
                return True
        return False

    def difference(self, other: RecordingAttempt) -> str | None:
        """How two calls differ; None if they differ in scalars only."""
        assert self.keys is not None
        assert other.keys is not None
        mine, others = self.trace, other.trace
        if any(not same_scalar(mine.arguments[n], others.arguments[n]) for n in mine.pinned | others.pinned):
            return "it compares or returns a number of a float argument, which changes"
        if self.keys.places != other.keys.places:
            return "the order of random ops"
        return self.recorded.difference(other.recorded)

    def state_difference(self, other: RecordingAttempt) -> str | None:
        """How the objects that two calls found differ; None if they are the same. Positions of tensors in recordings
        can be compared only if they are."""
        pairs = (
            (self.others, other.others),
            (self.before.plain, other.before.plain),
            (self.watched.optimizers, other.watched.optimizers),
        )
        if any(len(mine) != len(others) or not all(map(is_, mine, others)) for mine, others in pairs):
            return "it uses other tensors or optimizers"
        return None

    def forget_arguments(self) -> None:
        """Release the arguments of the call, which may be large, and keep the state that later calls are compared
        with."""
        self.recorded.recording.externals.clear()
        self.before.tensors, self.before.refs = self.others, []
        del self.call

    def forget_tensors(self) -> None:
        """Release the tensors of the call, and keep the scalars that later calls are compared with."""
        self.forget_arguments()
        self.recorded.recording.operands.clear()
        del self.others, self.before, self.watched, self.steps
