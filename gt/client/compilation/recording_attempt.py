"""One call of a compiled function that runs its Python code while GT records its instructions."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

from gt.client.compilation.argument_changes import ArgumentChanges
from gt.client.compilation.call_arguments import CallArguments, unique_tensors
from gt.client.compilation.call_effects import CallTensors, NotRepeatable, RecordedCallBuilder, version_of
from gt.client.compilation.call_recorder import CallRecorder, Recording
from gt.client.compilation.random_keys import KeyPlan, plan_keys
from gt.client.compilation.recorded_call import RecordedCall
from gt.client.compilation.scalar_plan import StepScalars, same_scalar
from gt.client.compilation.static_reads import is_instance
from gt.client.compilation.traced_floats import FloatTrace
from gt.client.compilation.watched_state import WatchedState
from gt.client.optimizer_step_hooks import optimizer_of_step
from gt.client.storage import Storage, StorageView
from gt.client.tensor import Tensor
from gt.client.torch_patches.dispatch import tree_leaves
from gt.core.messages import BeginStep


class RecordingAttempt:
    """One call of a function, recorded. `touched` are objects that earlier calls have used and that cannot be reached
    from `roots`; after the call, those that this call has used. `reason` tells why the call cannot be repeated; it is
    empty if it can. `obstacle` is the reason if it lies in the session and not in the function. `changes` are the
    values besides tensors that the call has changed."""

    def __init__(
        self,
        call: CallArguments,
        roots: Sequence[tuple[str, object]],
        touched: Sequence[object],
        stepped: dict[int, list[Tensor]],
    ) -> None:
        self.call = call
        self.reason = ""
        self.obstacle = ""
        self.touched = touched
        self.watched = WatchedState(roots, touched)
        arguments = unique_tensors(call.tensors)
        known = {id(tensor) for tensor in arguments}
        others = [tensor for tensor in self.watched.tensors if id(tensor) not in known]
        optimizers = self.watched.optimizers
        counts = {id(value) for each in optimizers for entries in each.state.values() for value in entries.values()}
        self.before = CallTensors(arguments, others, self.watched.plain, counts)
        self.steps = [StepScalars(optimizer, stepped.get(id(optimizer))) for optimizer in optimizers]
        self.trace = FloatTrace(call.floats)
        self.recorded: RecordedCall

    def run(self, function: Callable[..., Any]) -> Any:
        """Run the function, record its instructions and effects, and return its output."""
        others = self.before.tensors[self.before.arguments :]
        arguments = ArgumentChanges(function, self.call, self.trace, others)
        try:
            with CallRecorder(self.call.session) as recording:
                output = function(*arguments.args, **arguments.kwargs)
                try:
                    recording.forget_hinted()
                    builder = RecordedCallBuilder(recording, self.before, arguments)
                    self.touched = self._find_touched(recording, builder.unfound(), output)
                    output, templates, structure = builder.results(output, self.watched.known_ids)
                    self.recorded = builder.call(templates, structure)
                    self.before.keep(builder.used)
                    self.used_plain = builder.used_plain
                except NotRepeatable as error:
                    self.reason = str(error)
                    output = arguments.restored(output)
        finally:
            changed = arguments.apply()
        self.obstacle = recording.obstacle
        self.changes = self.watched.changes()
        self.reason = self.obstacle or self.reason or changed or self._reason(recording)
        return output

    @property
    def others(self) -> list[Tensor]:
        """The tensors that the call has used and that are no arguments."""
        return self.before.tensors[self.before.arguments :]

    def _find_touched(self, recording: Recording, unfound: Sequence[Storage], output: Any) -> list[object]:
        """The modules, optimizers and tensors that the call has used and that the function does not reach."""
        begun = [each.step for each in recording.instructions if isinstance(each, BeginStep)]
        used = {id(storage) for storage in recording.externals.values()}
        found = [
            *[module for reference in recording.modules.values() if (module := reference()) is not None],
            *map(optimizer_of_step, begun),
            *[each for each in self.touched if is_instance(each, Tensor) and id(each._ref.storage) in used],  # type: ignore[attr-defined]
            *(_handles_of(unfound, output) if unfound else ()),
        ]
        return [each for each in found if each is not None and id(each) not in self.watched.own_ids]

    def _reason(self, recording: Recording) -> str:
        """The reason why the recording cannot be repeated, or an empty text."""
        for steps in self.steps:
            steps.align(self.recorded, self.before.tensors)
        if reason := recording.side_effect():
            return reason
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
        self.steps = [steps for steps in self.steps if steps.is_stepped]
        keys = plan_keys(recording)
        if keys is None:
            return "it uses or sets torch's random generator for something else than ops on GT tensors"
        self.keys: KeyPlan = keys
        return ""

    def difference(self, before: RecordingAttempt) -> str | None:
        """How the call differs from an earlier one; None if in scalars only."""
        mine, others = self.trace, before.trace
        if any(not same_scalar(mine.arguments[n], others.arguments[n]) for n in mine.pinned | others.pinned):
            return "it compares or returns a number of a float argument, which changes"
        if self.keys.places != before.keys.places:
            return "the order of random ops"
        return self.recorded.difference(before.recorded)

    def state_objects(self) -> tuple[Sequence[object], ...]:
        """The objects of the function's state that the call has used: tensors on GT, plain ones, optimizers. Positions
        in recordings can be compared only if these are the same."""
        return self.others, self.used_plain, [steps.optimizer for steps in self.steps]

    def forget_arguments(self) -> None:
        """Release the arguments of the call, which may be large, and keep the state that later calls are compared
        with."""
        self.recorded.recording.externals.clear()
        self.before.tensors, self.before.refs = self.others, []
        self.before.arguments = 0
        del self.call

    def forget_tensors(self) -> None:
        """Release the tensors of the call, and keep the scalars that later calls are compared with."""
        self.forget_arguments()
        self.recorded.recording.operands.clear()
        del self.before, self.watched, self.steps, self.touched, self.used_plain


def differ(now: tuple[Sequence[object], ...], before: tuple[Sequence[object], ...]) -> str | None:
    """How the objects of the state that two calls used differ; None if they are the same."""
    if all(len(mine) == len(others) and all(map(is_, mine, others)) for mine, others in zip(now, before, strict=True)):
        return None
    return "it uses other tensors or optimizers"


def _handles_of(storages: Sequence[Storage], output: Any) -> list[Tensor]:
    """The handles of storages that the program has, without those in the output of a call, and without gradients, which
    come and go with their parameters. A pass over all objects of the program."""
    wanted = set(map(id, storages))
    results = {id(leaf) for leaf in tree_leaves(output)}
    found: list[Any] = []
    referring: Iterable[Any] = storages
    for _ in range(3):  # a storage, a view of it, the attributes of a parameter, the parameter
        referring = [each for each in gc.get_referrers(*referring) if is_instance(each, StorageView | dict | Tensor)]
        tensors = [each for each in referring if is_instance(each, Tensor)]
        found += [each for each in tensors if id(each._ref.storage) in wanted and id(each) not in results]
        referring = [each for each in referring if _refers(each, wanted)]
        if not referring:
            break
    unique = {id(each): each for each in found}
    gradients = {id(each.grad) for each in unique.values() if each.is_leaf}
    return [each for ident, each in unique.items() if ident not in gradients]


def _refers(each: Any, wanted: set[int]) -> bool:
    """Whether an object is a view of one of the storages, or the attributes of a tensor that has one of them."""
    ref = each.get("_ref") if is_instance(each, dict) else each if is_instance(each, StorageView) else None
    return ref is not None and id(getattr(ref, "storage", None)) in wanted
