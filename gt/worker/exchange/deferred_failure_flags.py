"""Flags of exchanges between GPUs, which stay on the device until a value leaves the worker.

Reading a flag would make the host wait for the device, and no work could be launched ahead. Until the flags are read,
the values that the worker has computed from flagged ones may be wrong. So its own flags in later exchanges are set, on
the device, if any flag is set that it has not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gt.core.messages import RunOp
from gt.worker.exchange.failure_store import FailureStore
from gt.worker.failed_value import FailedValue


class FlagSource(NamedTuple):
    """The task that a flag belongs to: its position in the exchange with a number among some members. The failure
    behind the flag is found by these three."""

    members: tuple[int, ...]
    number: int
    task: int


class FlaggedCommand(NamedTuple):
    """A command whose exchange had a flag that is set, and the source of the flag."""

    command: RunOp
    source: FlagSource


class DeferredFailureFlags:
    """The flags that this worker has not read. `doubt` is a scalar on the device, which is not 0 if one of them is
    set."""

    def __init__(self, device: torch.device, failures: FailureStore) -> None:
        self._failures = failures
        self.doubt = torch.zeros((), dtype=torch.uint8, device=device)
        self._flags: list[torch.Tensor] = []
        self._sources: list[FlagSource] = []
        self._commands: list[RunOp] = []

    def add(self, flag: torch.Tensor, source: FlagSource) -> None:
        """Keep a flag: an element of any dtype, set if it is not 0."""
        is_set = (flag != 0).to(torch.uint8)
        torch.maximum(self.doubt, is_set, out=self.doubt)
        self._flags.append(is_set)
        self._sources.append(source)

    def assign(self, command: RunOp) -> None:
        """Note that the flags which were added since the last call belong to a command."""
        self._commands += [command] * (len(self._flags) - len(self._commands))

    def failure_of(self, source: FlagSource) -> FailedValue:
        return self._failures.read(*source)

    def __len__(self) -> int:
        return len(self._flags)

    def read(self) -> list[FlaggedCommand]:
        """The commands whose flags are set. All flags are copied to the host together."""
        if not self._flags:
            return []
        flags, sources, commands = self._flags, self._sources, self._commands
        self._flags, self._sources, self._commands = [], [], []
        self.doubt.zero_()
        values = torch.stack(flags).tolist()
        pairs = map(FlaggedCommand, commands, sources)
        return [pair for pair, flag in zip(pairs, values, strict=True) if flag]
