"""The table of GT_DEBUG_COMPILE: runs of ops that are compiled, those that are not and why, and the gain of code."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.tables import CODE, Column, LogTable, short_op

COLUMNS = (
    Column("what", 8),
    Column("ops", 60),
    Column("compiling s", 11, is_number=True),
    Column("ops us", 8, is_number=True),
    Column("code us", 8, is_number=True),
    Column("gain", 7, is_number=True),
)
MICROSECONDS = 1e6

code_table = LogTable(CODE, "code", COLUMNS)


def note_asked(ops: Sequence[str]) -> None:
    """A run of ops was given to the compile server."""
    _add("asked", ops)


def note_compiled(ops: Sequence[str], seconds: float) -> None:
    """The compile server has made code in `seconds`."""
    _add("compiled", ops, f"{seconds:.1f}")


def note_used(ops: Sequence[str], eager: float, compiled: float) -> None:
    """Code has given the results of its ops, and runs in their place; the times of both are seconds of one run."""
    gain = f"{eager / compiled:.1f} x" if compiled else ""
    _add("used", ops, "", f"{eager * MICROSECONDS:.0f}", f"{compiled * MICROSECONDS:.0f}", gain)


def note_eager(ops: Sequence[str], reason: str) -> None:
    """Ops are not compiled, or their code is not used."""
    _add("eager", ops, reason=reason)


def _add(what: str, ops: Sequence[str], *numbers: str, reason: str = "") -> None:
    if code_table.is_on:
        names = short_op(ops[0]) if len(ops) == 1 else f"{len(ops)} ops from {short_op(ops[0])} to {short_op(ops[-1])}"
        code_table.add([what, names, *numbers, *[""] * (4 - len(numbers))], reason.splitlines())
