"""Steps of optimizers, which are done whole or not at all.

An optimizer writes several times in a step, and only some of these writes depend on gradients. Where a gradient has
failed, all of them are skipped. Small tensors that are written between two steps, such as the running statistics of a
batch norm, are copied before the first write, so that they can return to their values at the end of the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import NamedTuple

from gt.core.ids import session_of
from gt.core.messages import CURRENT, KEPT, STEP_TOKEN, VersionSpan, WorkerAgreeOnStep, WorkerBeginStep, WorkerEndStep
from gt.worker.engines.engine import Engine, Value
from gt.worker.failed_value import FailedValue

MAX_KEPT_BYTES = 1 << 16  # larger tensors are not copied


class KeptVersion(NamedTuple):
    """A copy of a tensor's value at the end of a step: the id of that version, and the id of the next one."""

    value: Value
    since: int
    until: int


class _SessionSteps:
    """The steps of one session: the id of the last one done, the one that has begun (0: none), and its failure."""

    __slots__ = ("begun", "done", "failed")

    def __init__(self) -> None:
        self.done = 0
        self.begun = 0
        self.failed: FailedValue | None = None


class OptimizerSteps:
    """The steps of all sessions, and the versions of tensors from before them.

    `kept` has copies by the present ids of their tensors. `unwritten` maps the id of a tensor to the id it had before
    an op that was to write to it and did not begin. `tokens` are the tensors by which workers agree on a step. Ids
    follow the order of the program: a tensor from before a step has a lower id than the step.
    """

    def __init__(self, engine: Engine) -> None:
        self.kept: dict[int, KeptVersion] = {}
        self.unwritten: dict[int, int] = {}
        self.tokens: set[int] = set()
        self.sessions: dict[int, _SessionSteps] = {}
        self._engine = engine
        self._token = engine.empty(STEP_TOKEN)  # its value says nothing, and workers give each other copies
        self._follows_all = False

    def begin(self, command: WorkerBeginStep, tensors: MutableMapping[int, Value | FailedValue]) -> None:
        session = self.sessions.setdefault(session_of(command.step), _SessionSteps())
        values = map(tensors.get, command.gradients)
        failed = next((value for value in values if isinstance(value, FailedValue)), None)
        session.begun, session.failed = command.step, failed and failed.for_dependents()
        if command.token:
            self.tokens.add(command.token)
            tensors[command.token] = session.failed or self._token
        self._update()

    def agree(self, command: WorkerAgreeOnStep, tokens: Value | FailedValue | None) -> None:
        """Settle a step. `tokens` is the sum of all workers' tokens, which has failed where any gradient has failed."""
        session = self.sessions[session_of(command.step)]
        self.tokens = {token for token in self.tokens if session_of(token) != session_of(command.step)}
        if isinstance(tokens, FailedValue) and session.failed is None:
            session.failed = tokens.for_dependents()
        self._update()

    def end(self, command: WorkerEndStep) -> None:
        session = self.sessions.setdefault(session_of(command.end), _SessionSteps())
        is_done = command.is_done and session.failed is None
        session.begun, session.failed = 0, None
        if is_done:
            session.done = command.end
            self._forget_kept(session_of(command.end))
        self._update()

    def forget(self, session: int) -> None:
        self.sessions.pop(session, None)
        self._forget_kept(session)
        self.unwritten = {new: old for new, old in self.unwritten.items() if session_of(new) != session}
        self._update()

    def note_unwritten(self, ids: Iterable[tuple[int, int]]) -> None:
        """Note tensors that have new ids, each given with its id before, although nothing was written to them."""
        self.unwritten.update(ids)
        self._update()

    def follows(self, ident: int) -> bool:
        """Whether a write to a tensor must be announced by `before_write`, and perhaps skipped. Hot path."""
        return self._follows_all or ident in self.kept

    def _update(self) -> None:
        """Note whether writes to all tensors must be announced: not inside steps without a failed gradient, where no
        write is skipped and nothing is copied."""
        is_free = all(session.begun and session.failed is None for session in self.sessions.values())
        self._follows_all = bool(self.unwritten) or not is_free

    def free(self, idents: Sequence[int]) -> None:
        for ident in idents:
            self.kept.pop(ident, None)
            self.unwritten.pop(ident, None)

    def _forget_kept(self, session: int) -> None:
        self.kept = {ident: kept for ident, kept in self.kept.items() if session_of(ident) != session}

    def skip_reason(self, written: Sequence[int]) -> FailedValue | None:
        """The failed gradient because of which these tensors must not be written now, or None."""
        session = self.sessions.get(session_of(written[0]))
        if session is None or session.failed is None or min(written) > session.begun:
            return None
        return session.failed

    def before_write(self, written: Sequence[int], renamed: Sequence[int], value_of: Callable[[int], object]) -> None:
        """Follow tensors that are about to be written to their new ids, and copy those whose values may be needed."""
        session = self.sessions.get(session_of(written[0]))
        for old, new in zip(written, renamed, strict=True):
            since = self.unwritten.pop(old, old)
            if old in self.kept:
                self.kept[new] = self.kept.pop(old)
            elif session is not None and not session.begun and since < session.done:
                value = value_of(old)
                if (
                    value is not None
                    and not isinstance(value, FailedValue)
                    and self._engine.nbytes(value) <= MAX_KEPT_BYTES
                ):
                    self.kept[new] = KeptVersion(self._engine.copy(value), since, new)

    def keep_previous(self, ident: int, value: object) -> None:
        """A tensor without a value is about to be overwritten and to get the id `ident`: its value at the end of the
        last step stays available."""
        session = self.sessions.get(session_of(ident))
        if session is None or ident in self.kept or not isinstance(value, FailedValue) or value.previous is None:
            return
        if value.since < session.done:
            self.kept[ident] = KeptVersion(value.previous, value.since, value.until)

    def version(self, ident: int, value: Value | FailedValue, version: int) -> Value | FailedValue:
        """The current value of a tensor, its value at the end of the last step (KEPT), or its last known value."""
        if version == KEPT and ident in self.kept:
            return self.kept[ident].value
        if version == CURRENT or not isinstance(value, FailedValue) or value.previous is None:
            return value
        return value.previous

    def span(self, ident: int, value: Value | FailedValue) -> VersionSpan:
        """The ids between which a tensor had its last known value, and those between which it had its kept value."""
        kept = self.kept.get(ident)
        ids = (kept.since, kept.until) if kept is not None else (0, 0)
        if isinstance(value, FailedValue):
            return VersionSpan(value.since, value.until, *ids)
        return VersionSpan(self.unwritten.get(ident, ident), 0, *ids)
