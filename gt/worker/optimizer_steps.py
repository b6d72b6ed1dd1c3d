"""Steps of optimizers: done whole or not at all, and what was written before them is kept until they are done.

An optimizer writes several times in a step, and only some of these writes depend on gradients. Where a gradient has no
value, none of them begins. Small tensors that are written between two steps, such as the running statistics of a batch
norm, are copied before, so that they can go back to the end of the last step that was done.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import NamedTuple

from gt.core.ids import session_of
from gt.core.messages import CURRENT, KEPT, STEP_TOKEN, Span, WorkerAgreeOnStep, WorkerBeginStep, WorkerEndStep
from gt.worker.engines.engine import Engine, Value
from gt.worker.failed_value import FailedValue

KEPT_BYTES = 1 << 16  # larger tensors are not copied


class Kept(NamedTuple):
    """A copy of the value that a tensor had at the end of a step: the id of that version, and of the next."""

    value: Value
    since: int
    until: int


class _Progress:
    """Of a session: the end of the last step that was done; the step that has begun, and what it fails with."""

    __slots__ = ("begun", "cause", "done")

    def __init__(self) -> None:
        self.done = 0
        self.begun = 0
        self.cause: FailedValue | None = None


class Steps:
    """`kept` are copies by the present ids of their tensors, and `unwritten` the ids that tensors had before ops that
    should have written to them and did not begin, where they go on with a value. `tokens` are being added up. Ids are
    given in the order of the program, so those of what was there before a step are lower than the step's own."""

    def __init__(self, engine: Engine) -> None:
        self.kept: dict[int, Kept] = {}
        self.unwritten: dict[int, int] = {}
        self.tokens: set[int] = set()
        self.sessions: dict[int, _Progress] = {}
        self._engine = engine

    def begin(self, command: WorkerBeginStep, store: MutableMapping[int, Value | FailedValue]) -> None:
        progress = self.sessions.setdefault(session_of(command.step), _Progress())
        values = map(store.get, command.gradients)
        cause = next((value for value in values if isinstance(value, FailedValue)), None)
        progress.begun, progress.cause = command.step, cause and cause.passed_on()
        if command.token:
            self.tokens.add(command.token)
            store[command.token] = progress.cause or self._engine.empty(STEP_TOKEN)

    def agree(self, command: WorkerAgreeOnStep, tokens: Value | FailedValue | None) -> None:
        progress = self.sessions[session_of(command.step)]
        self.tokens = {token for token in self.tokens if session_of(token) != session_of(command.step)}
        if isinstance(tokens, FailedValue) and progress.cause is None:
            progress.cause = tokens.passed_on()

    def end(self, command: WorkerEndStep) -> None:
        progress = self.sessions.setdefault(session_of(command.step), _Progress())
        is_done = command.is_done and progress.cause is None
        progress.begun, progress.cause = 0, None
        if is_done:
            progress.done = command.step
            self._forget_kept(session_of(command.step))

    def forget(self, session: int) -> None:
        self.sessions.pop(session, None)
        self._forget_kept(session)
        self.unwritten = {new: old for new, old in self.unwritten.items() if session_of(new) != session}

    def free(self, idents: Sequence[int]) -> None:
        for ident in idents:
            self.kept.pop(ident, None)
            self.unwritten.pop(ident, None)

    def _forget_kept(self, session: int) -> None:
        self.kept = {ident: kept for ident, kept in self.kept.items() if session_of(ident) != session}

    def cause(self, written: Sequence[int]) -> FailedValue | None:
        """Why these tensors must not be written now, if they must not."""
        progress = self.sessions.get(session_of(written[0]))
        if progress is None or progress.cause is None or min(written) > progress.begun:
            return None
        return progress.cause

    def renew(self, written: Sequence[int], renewed: Sequence[int], value_of: Callable[[int], object]) -> None:
        """Tensors are about to be written, and go on under new ids."""
        progress = self.sessions.get(session_of(written[0]))
        for old, new in zip(written, renewed, strict=True):
            since = self.unwritten.pop(old, old)
            if old in self.kept:
                self.kept[new] = self.kept.pop(old)
            elif progress is not None and not progress.begun and since < progress.done:
                value = value_of(old)
                if (
                    value is not None
                    and not isinstance(value, FailedValue)
                    and self._engine.nbytes(value) <= KEPT_BYTES
                ):
                    self.kept[new] = Kept(self._engine.copy(value), since, new)

    def version(self, ident: int, value: Value | FailedValue, version: int) -> Value | FailedValue:
        """One of the values that a tensor has or had."""
        if version == KEPT and ident in self.kept:
            return self.kept[ident].value
        if version == CURRENT or not isinstance(value, FailedValue) or value.former is None:
            return value
        return value.former

    def span(self, ident: int, value: Value | FailedValue) -> Span:
        """Since when and until when a tensor had the value that can still be had."""
        kept = self.kept.get(ident)
        ids = (kept.since, kept.until) if kept is not None else (0, 0)
        if isinstance(value, FailedValue):
            return Span(value.since, value.until, *ids)
        return Span(self.unwritten.get(ident, ident), 0, *ids)
