"""The most recent instructions of a program: `gt.debug.tape` and `gt.debug.print_tape`."""

from __future__ import annotations

import sys
from typing import TextIO

from gt.client import active_session
from gt.client.session import Session
from gt.core.ids import short_id
from gt.core.messages import CreateTensor, FetchTensor, FreeTensors, Instruction, QueryOp, RunOp


def tape(count: int = 50) -> list[str]:
    """The most recent instructions, oldest first, one line each.

    >>> x = gt.ones(2)
    >>> y = x * 3
    >>> gt.debug.tape(1)
    ['%2 = aten.mul.Tensor(%1, 3)...']
    """
    session = active_session.current()
    session.outbox.flush()
    lines = [_line(session, each) for instruction in session.outbox.tape for each in session.expand(instruction)]
    return [line for line in lines if line][-count:]


def print_tape(count: int = 50, file: TextIO | None = None) -> None:
    """Print the most recent instructions: `%3 = aten.mm.default(%1, %2)  train.py:12`.

    >>> x = gt.ones(2)
    >>> y = x * 3
    >>> gt.debug.print_tape()
    %1 = aten.ones.default()...
    %2 = aten.mul.Tensor(%1, 3)...
    """
    print("\n".join(tape(count)), file=file or sys.stdout)


def _line(session: Session, instruction: Instruction) -> str:
    if isinstance(instruction, RunOp | QueryOp):
        signature = session.signatures.get(instruction.op_id)
        op = signature.op if signature is not None else "(forgotten op)"
        outputs = instruction.outputs if isinstance(instruction, RunOp) else (*instruction.written, instruction.first)
        arguments = [*map(_name, instruction.inputs), *map(repr, instruction.scalars)]
        call = f"{', '.join(map(_name, outputs))} = {op}({', '.join(arguments)})"
        return f"{call:<72}  {session.sites.text(instruction.site)}"
    if isinstance(instruction, CreateTensor):
        made = f"{_name(instruction.id)} = upload {instruction.meta}"
        return f"{made:<72}  {session.sites.text(instruction.site)}"
    if isinstance(instruction, FreeTensors):
        return f"free {', '.join(map(_name, instruction.ids))}"
    if isinstance(instruction, FetchTensor):
        return f"fetch {_name(instruction.id)}"
    return ""


def _name(ident: int) -> str:
    return f"%{short_id(ident)}"
