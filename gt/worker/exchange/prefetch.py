"""What comes next in a batch: the bytes that a later command waits for can come while the ones before it compute.

Without this a stage of a pipeline asks for its next activations only when it has nothing else to do, and pays the time
of the transfer for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any

from gt.core.messages import Command, RunOp
from gt.worker.exchange.interface import Swap
from gt.worker.programs import ProgramKernel


class ReceivePrefetch:
    """Follows a batch that is being run. Its iterator knows how far that is, so following costs the loop nothing."""

    def __init__(self) -> None:
        self._commands: Sequence[Command] = ()
        self._iterator: Iterator[Command] = iter(())
        self._searched = 0

    def follow(self, commands: Sequence[Command]) -> Iterator[Command]:
        self._commands = commands
        self._iterator = iter(commands)
        self._searched = 0
        return self._iterator

    def next_receive(self, kernels: Mapping[int, Any]) -> Swap | None:
        """The first exchange among the commands to come in which this worker receives, each told once. None also where
        that cannot be known yet."""
        begun = len(self._commands) - length_hint(self._iterator)
        for place in range(max(begun, self._searched), len(self._commands)):
            self._searched = place
            command = self._commands[place]
            if type(command) is not RunOp:
                continue
            kernel = kernels.get(command.op_id)
            if kernel is None:
                return None  # the batch defines it before
            if isinstance(kernel, ProgramKernel):
                if kernel.swaps is None:
                    return None
                for swap in kernel.swaps:
                    if swap.receives:
                        self._searched = place + 1
                        return swap
        self._searched = len(self._commands)
        return None
