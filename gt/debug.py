"""Looking inside: what this program has asked for lately."""

from __future__ import annotations

import sys
from typing import NamedTuple, TextIO

from gt.client import session as sessions
from gt.client.session import Session
from gt.core.messages import CreateTensor, FetchTensor, FreeTensors, Instruction, QueryOp, RunOp, TrafficRead, short_id


class CollectiveEvent(NamedTuple):
    """One collective that ran: what it is, along which mesh axes, the payload bytes that all workers together
    received, the op it was for and the line that issued it."""

    kind: str
    axis: str
    bytes: int
    op: str
    line: str


class Comm:
    """What moved between workers inside `with gt.debug.comm() as c:`. `bytes` is counted by the workers, `events` are
    what the planner meant; `pairs` has the counted bytes by (sender, receiver)."""

    def __init__(self) -> None:
        self.bytes = 0
        self.pairs: dict[tuple[int, int], int] = {}
        self.events: list[CollectiveEvent] = []

    def __enter__(self) -> Comm:
        self._session = sessions.current()
        self._before = _by_pair(self._session.read_traffic(watch=True))
        return self

    def __exit__(self, *error: object) -> None:
        answer = self._session.read_traffic(watch=False)
        after = _by_pair(answer)
        self.pairs = {pair: count - self._before.get(pair, 0) for pair, count in after.items()}
        self.pairs = {pair: count for pair, count in self.pairs.items() if count}
        self.bytes = sum(self.pairs.values())
        self.events = [
            CollectiveEvent(c.kind, " ".join(c.axes), c.bytes, c.op, _place(self._session, c.site))
            for c in answer.collectives
        ]

    def count(self, kind: str) -> int:
        """How many collectives of a kind ran."""
        return sum(event.kind == kind for event in self.events)


def comm() -> Comm:
    """Record the collectives that run inside: `with gt.debug.comm() as c: ...; print(c.bytes, c.events)`."""
    return Comm()


def _by_pair(answer: TrafficRead) -> dict[tuple[int, int], int]:
    return {(sender, worker): count for worker, by in answer.received.items() for sender, count in by.items()}


def tape(count: int = 50) -> list[str]:
    """The most recent instructions, oldest first, one line each."""
    session = sessions.current()
    session.outbox.flush()
    lines = [line for line in map(lambda instruction: _line(session, instruction), session.outbox.tape) if line]
    return lines[-count:]


def print_tape(count: int = 50, file: TextIO | None = None) -> None:
    """Print the most recent instructions: `%3 = aten.mm.default(%1, %2)  train.py:12`."""
    print("\n".join(tape(count)), file=file or sys.stdout)


def _line(session: Session, instruction: Instruction) -> str:
    if isinstance(instruction, RunOp | QueryOp):
        signature = session.signatures.get(instruction.code)
        op = signature.op if signature is not None else "(forgotten op)"
        outputs = instruction.outputs if isinstance(instruction, RunOp) else (*instruction.written, instruction.first)
        arguments = [*map(_name, instruction.inputs), *map(repr, instruction.scalars)]
        call = f"{', '.join(map(_name, outputs))} = {op}({', '.join(arguments)})"
        return f"{call:<72}  {_place(session, instruction.site)}"
    if isinstance(instruction, CreateTensor):
        return (
            f"{_name(instruction.id)} = upload {instruction.meta}".ljust(72) + f"  {_place(session, instruction.site)}"
        )
    if isinstance(instruction, FreeTensors):
        return f"free {', '.join(map(_name, instruction.ids))}"
    if isinstance(instruction, FetchTensor):
        return f"fetch {_name(instruction.id)}"
    return ""


def _name(ident: int) -> str:
    return f"%{short_id(ident)}"


def _place(session: Session, site: int) -> str:
    file, line, _ = session.sites.place(site)
    return f"{file}:{line}"
