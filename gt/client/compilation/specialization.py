"""The recordings of a compiled function for one kind of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from gt.client.compilation.call_arguments import CallArguments
from gt.client.compilation.call_effects import NotRepeatable
from gt.client.compilation.recording_attempt import RecordingAttempt, differ
from gt.client.compilation.replayable_call import ReplayableCall
from gt.client.compilation.scalar_plan import VaryingScalar
from gt.client.compilation.watched_state import WatchedState
from gt.client.compilation.watched_values import Place
from gt.client.tensor import Tensor

RECORDED_CALLS = 3  # calls that must agree before the function is skipped
MAX_ATTEMPTS = 12  # recorded calls after which a function that does not repeat itself is no longer recorded
MAX_REPLAYABLE = 8  # recordings for the same arguments, for different states of the function


class Disagreement(Exception):
    """A call that ran the code did something else than the recorded call that applies to it. `skipped` calls before it
    did not run the code since the last check that agreed."""

    def __init__(self, difference: str, skipped: int) -> None:
        super().__init__(difference)
        self.skipped = skipped


class Specialization:
    """The recordings of a function for one kind of arguments. `refused` tells why no further call is recorded; it is
    empty if calls still are. `obstacle` tells why the last recorded call brought no recording nearer that later calls
    can repeat; it is empty if it did. `check_every` as in `gt.compile`."""

    def __init__(self, check_every: int) -> None:
        self.replayable: list[ReplayableCall] = []
        self.refused = ""
        self.obstacle = ""
        self._check_every = check_every
        # groups of calls that agree, each of fewer than RECORDED_CALLS
        self._pending: list[list[RecordingAttempt]] = []
        # the last recorded call behind each replayable one: a scalar that differs between them is no constant
        self._earlier: list[RecordingAttempt] = []
        self.attempts = 0
        self._stepped: dict[int, list[Tensor]] = {}  # parameters of steps in the last call, by id() of the optimizer
        self._own_changes: set[Place] = set()  # places of values that the function itself has changed
        self._touched: Sequence[object] = ()  # objects that the last call has used and that the function does not reach

    def find(self, call: CallArguments) -> ReplayableCall | None:
        """The recorded call to repeat in place of a call, if any."""
        return next((each for each in reversed(self.replayable) if each.applies_to(call)), None)

    def check(
        self, function: Callable[..., Any], call: CallArguments, roots: Sequence[tuple[str, object]],
        replayable: ReplayableCall,
    ) -> Any:  # fmt: skip
        """Run the function for a call to which a recorded one applies, and return its output. Raises Disagreement if it
        does something else than the recorded call; then calls are recorded anew."""
        attempt, output = self._run(function, call, roots)
        if attempt.obstacle:  # of the session: this call tells nothing
            return output
        if difference := attempt.reason or replayable.difference(attempt):
            self.replayable.remove(replayable)
            self._earlier.clear()
            self.attempts, self.refused = 0, ""
            raise Disagreement(difference, replayable.skipped)
        replayable.confirm(attempt, frozenset())
        return output

    def record(
        self, function: Callable[..., Any], call: CallArguments, roots: Sequence[tuple[str, object]]
    ) -> tuple[Any, str]:
        """Run the function and record it. Returns its output, and why later calls are not skipped, if so."""
        self.obstacle = self.replayable[-1].watched.changed_state() if self.replayable else ""
        fitting = [(each, self._harmless(each.watched)) for each in self.replayable if each.fits(call)]
        fitting = [(each, changed) for each, changed in fitting if len(changed) == len(each.watched.changes())]
        changed_since = [set().union(*[self._harmless(each.watched) for each in calls]) for calls in self._pending]
        attempt, output = self._run(function, call, roots)
        self.attempts += 1
        if attempt.reason:
            self.obstacle = attempt.reason
            return output, self._give_up_after(attempt.reason)
        for replayable, changed in fitting:
            if not replayable.difference(attempt):
                replayable.confirm(attempt, changed)
                self.attempts, self.obstacle = 0, ""
                return output, self.refused
        differences = [_difference(attempt, calls[-1]) for calls in self._pending]
        groups = zip(self._pending, changed_since, differences, strict=True)
        calls, ignored = next(((calls, changed) for calls, changed, found in groups if not found), ([], set()))
        if not calls:
            self._pending = [*self._pending[1 - MAX_REPLAYABLE :], calls]
        calls.append(attempt)
        if len(calls) < RECORDED_CALLS:
            attempt.forget_arguments()
            if differences and differences[-1]:
                self.obstacle = f"its calls differ: {differences[-1]}"
            return output, self._give_up_after(self.obstacle)
        try:
            self.replayable.append(self._repeat(calls, ignored))
        except (VaryingScalar, NotRepeatable) as error:
            self.refused = str(error)
        attempt.forget_tensors()
        self._earlier.append(attempt)
        self._pending.remove(calls)
        self.attempts = 0
        if len(self.replayable) >= MAX_REPLAYABLE and not self.refused:
            self.refused = f"it was recorded {MAX_REPLAYABLE} times for the same arguments, and its state still changes"
        return output, self.refused

    def _harmless(self, state: WatchedState) -> set[Place]:
        """The places of values that have changed since a call, and on which the code does not depend as far as GT sees:
        it does not name them, or changes them itself."""
        return {
            each.place for each in state.changes() if each.place in self._own_changes or not state.may_be_read(each)
        }

    def _run(
        self, function: Callable[..., Any], call: CallArguments, roots: Sequence[tuple[str, object]]
    ) -> tuple[RecordingAttempt, Any]:
        attempt = RecordingAttempt(call, roots, self._touched, self._stepped)
        output = attempt.run(function)
        self._touched = attempt.touched
        self._own_changes |= {each.place for each in attempt.changes}
        self._stepped.update((id(steps.optimizer), steps.place.parameters) for steps in attempt.steps if steps.place)
        return attempt, output

    def _repeat(self, calls: Sequence[RecordingAttempt], ignored: Set[Place]) -> ReplayableCall:
        """The call to repeat in place of those that agree with these, though values at `ignored` places have changed
        between them. Numbers that differ from earlier recordings are computed from the arguments, or are those of
        another state of the function."""
        for changed in calls[-1].changes:
            if changed.place not in ignored:
                raise NotRepeatable(
                    f"it changes {changed.name}, on which it may depend and which a skipped call would not change; "
                    "change it outside of the function"
                )
        earlier = [each for each in self._earlier if not calls[-1].difference(each)]
        try:
            return ReplayableCall(calls, earlier, ignored, self._check_every)
        except VaryingScalar:
            return ReplayableCall(calls, [], ignored, self._check_every)

    def _give_up_after(self, reason: str) -> str:
        if self.attempts >= MAX_ATTEMPTS:
            self.refused = reason
            self._pending, self._touched = [], ()
        return self.refused


def _difference(now: RecordingAttempt, before: RecordingAttempt) -> str | None:
    """How two calls differ; None if in scalars only."""
    return differ(now.state_objects(), before.state_objects()) or now.difference(before)
