"""Looking inside: what this program has asked for lately."""

from __future__ import annotations

import sys
from typing import TextIO

from gt.client import session as sessions
from gt.client.session import Session
from gt.core.messages import CreateTensor, FetchTensor, FreeTensors, Instruction, QueryOp, RunOp, short_id


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
