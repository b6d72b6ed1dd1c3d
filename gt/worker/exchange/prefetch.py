"""Finds the next command of a batch that receives a tensor, so that its bytes arrive during the commands before it.

Without this a stage of a pipeline asks for its next activations only when it has nothing else to do, and waits for
every transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any

from gt.core.messages import Command, RunOp
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.exchange.local_steps import LocalStep


class ReceivePrefetch:
    """Reads the position in a batch from the batch's iterator, so it costs the loop over the commands nothing."""

    def __init__(self) -> None:
        self._commands: Sequence[Command] = ()
        self._iterator: Iterator[Command] = iter(())
        self._searched = 0

    def follow(self, commands: Sequence[Command]) -> Iterator[Command]:
        self._commands = commands
        self._iterator = iter(commands)
        self._searched = 0
        return self._iterator

    @property
    def present(self) -> Command | None:
        """The command of the batch that runs."""
        begun = len(self._commands) - length_hint(self._iterator)
        return self._commands[begun - 1] if 0 < begun <= len(self._commands) else None

    @property
    def rest(self) -> Iterator[Command]:
        """The commands of the batch after it, as an iterator that moves on with the batch."""
        return self._iterator

    def ahead(self) -> Sequence[Command]:
        """The same commands, which stay ahead."""
        return self._commands[len(self._commands) - length_hint(self._iterator) :]

    def next_receive(self, ops: Mapping[int, Any]) -> LocalStep | None:
        """The first exchange of the commands ahead in which this worker receives; each is returned once. None also
        where the batch has yet to define an op, or a program has several exchanges."""
        begun = len(self._commands) - length_hint(self._iterator)
        for position in range(max(begun, self._searched), len(self._commands)):
            self._searched = position
            command = self._commands[position]
            if type(command) is not RunOp:
                continue
            bound = ops.get(command.op_id)
            if bound is None:
                return None
            if isinstance(bound, BoundOpProgram):
                if bound.exchanges is None:
                    return None
                for step in bound.exchanges:
                    if step.peers:
                        self._searched = position + 1
                        return step
        self._searched = len(self._commands)
        return None
