"""The recordings of a compiled function for one kind of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gt.client.compilation.call_arguments import CallArguments
from gt.client.compilation.recording_attempt import RecordingAttempt
from gt.client.compilation.replayable_call import ReplayableCall
from gt.client.compilation.scalar_plan import VaryingScalar
from gt.client.tensor import Tensor

RECORDED_CALLS = 3  # calls that must agree before the function is skipped
MAX_ATTEMPTS = 12  # recorded calls after which a function that does not repeat itself is no longer recorded
MAX_REPLAYABLE = 8  # recordings for the same arguments, for different states of the function


class Specialization:
    """The recordings of a function for one kind of arguments. `refused` tells why no further call is recorded; it is
    empty if calls still are. `obstacle` tells why the last recorded call brought no recording nearer that later calls
    can repeat; it is empty if it did."""

    def __init__(self) -> None:
        self.replayable: list[ReplayableCall] = []
        self.refused = ""
        self.obstacle = ""
        self._pending: list[
            list[RecordingAttempt]
        ] = []  # groups of calls that agree, each of fewer than RECORDED_CALLS
        # the last recorded call behind each replayable one: a scalar that differs between them is no constant
        self._earlier: list[RecordingAttempt] = []
        self.attempts = 0
        self._stepped: dict[int, list[Tensor]] = {}  # parameters of steps in the last call, by id() of the optimizer

    def record(
        self, function: Callable[..., Any], call: CallArguments, roots: Sequence[tuple[str, object]]
    ) -> tuple[Any, str]:
        """Run the function and record it. Returns its output, and why later calls are not skipped, if so."""
        self.obstacle = self.replayable[-1].changed_state() if self.replayable else ""
        attempt = RecordingAttempt(call, roots, self._stepped)
        output = attempt.run(function)
        self._stepped.update((id(steps.optimizer), steps.place.parameters) for steps in attempt.steps if steps.place)
        self.attempts += 1
        if attempt.watched.unknown:
            self.refused = attempt.reason
        if attempt.reason:
            self.obstacle = attempt.reason
            return output, self._give_up_after(attempt.reason)
        differences = [attempt.state_difference(calls[-1]) or attempt.difference(calls[-1]) for calls in self._pending]
        calls = next((calls for calls, found in zip(self._pending, differences, strict=True) if not found), [])
        if not calls:
            self._pending = [*self._pending[1 - MAX_REPLAYABLE :], calls]
        calls.append(attempt)
        if len(calls) < RECORDED_CALLS:
            attempt.forget_arguments()
            if differences and differences[-1]:
                self.obstacle = f"its calls differ: {differences[-1]}"
            return output, self._give_up_after(self.obstacle)
        try:
            earlier = [each for each in self._earlier if not attempt.difference(each)]
            self.replayable.append(ReplayableCall(calls, earlier))
        except VaryingScalar as error:
            self.refused = str(error)
        attempt.forget_tensors()
        self._earlier.append(attempt)
        self._pending.remove(calls)
        self.attempts = 0
        if len(self.replayable) >= MAX_REPLAYABLE and not self.refused:
            self.refused = f"it was recorded {MAX_REPLAYABLE} times for the same arguments, and its state still changes"
        return output, self.refused

    def _give_up_after(self, reason: str) -> str:
        if self.attempts >= MAX_ATTEMPTS:
            self.refused = reason
        return self.refused
