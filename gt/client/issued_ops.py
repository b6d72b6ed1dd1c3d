"""Records when the program issues its ops, while a trace is captured."""

from __future__ import annotations

from collections.abc import Iterator

from gt.client.session import Session
from gt.core.message_events import Captured, MonitorEvent, OpIssued, WorkerRan, WorkerSampled
from gt.core.messages import Instruction, RunOp


class IssuedOps:
    """The ops of one session that are issued between `begin` and `end`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def begin(self, limit: int) -> None:
        self._session.outbox.record_times(limit)

    def end(self) -> list[MonitorEvent]:
        return [op for when, each in self._session.outbox.take_times() for op in self._described(when, each)]

    def _described(self, when: int, instruction: Instruction) -> Iterator[OpIssued]:
        session = self._session
        for single in session.expand(instruction):
            if isinstance(single, RunOp) and single.outputs:
                signature = session.signatures.get(single.op_id)
                op = signature.op if signature is not None else "(forgotten op)"
                yield OpIssued(session.welcome.ident, when, op, session.sites.text(single.site), single.outputs[0])


class SessionCaptures:
    """Captures of a session whose dispatcher is a server that it shares: its own ops, and the commands that the workers
    run for it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._issued = IssuedOps(session)

    def begin(self, limit: int) -> None:
        self._recording = self._session.recordings.begin(limit)
        self._issued.begin(limit)

    def end(self, seconds: float) -> Captured:
        events = self._issued.end()
        recording, text = self._recording, self._session.sites.text
        self._session.recordings.end(recording)
        events += [WorkerRan(worker, ran, text(ran.site) if ran.site else "") for worker, ran in recording.ran]
        events += [WorkerSampled(*sample) for sample in recording.memory]
        return Captured(events, recording.dropped, ())
