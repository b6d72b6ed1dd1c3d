"""Failures that a worker learns of after it has run the commands that depend on them, from flags that stay on the
device.

The flags are read before a value leaves the worker. If one is set, the worker goes through the commands that it has run
since it last read flags, and marks the results of the flagged commands, and of all that depend on them, as failed.
Other values stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from itertools import chain

from gt.core.messages import Command, RunOp
from gt.worker.engines.engine import Value
from gt.worker.exchange.deferred_failure_flags import DeferredFailureFlags
from gt.worker.failed_value import FailedValue


class LateFailures:
    """Marks the failed results of commands that ran since the flags were last read. `expand` gives a program's
    commands."""

    def __init__(
        self,
        tensors: MutableMapping[int, Value | FailedValue],
        flags: DeferredFailureFlags,
        expand: Callable[[Command], Sequence[Command]],
    ) -> None:
        self._tensors = tensors
        self._flags = flags
        self._expand = expand
        self._commands: list[Command] = []

    def follow(self, commands: Sequence[Command], *, goes_on: bool = False) -> None:
        """Remember a batch that is about to run. `goes_on`: an exchange of an earlier batch has not finished."""
        if not self._flags and not goes_on:  # no flag can belong to earlier commands any more
            self._commands.clear()
        self._commands += commands

    def settle(self) -> None:
        """Read the flags, and mark the results that have failed. After that a value may leave the worker."""
        flagged = {id(command): source for command, source in reversed(self._flags.read())}
        if not flagged:
            return
        failed: dict[int, FailedValue] = {}
        for command in chain.from_iterable(map(self._expand, self._commands)):
            if isinstance(command, RunOp):
                cause = next((failed[ident] for ident in command.inputs if ident in failed), None)
                if cause is None and id(command) in flagged:
                    cause = self._flags.failure_of(flagged[id(command)])
                if cause is not None:
                    failed.update(dict.fromkeys(command.outputs, cause))
        for ident in failed.keys() & self._tensors.keys():
            self._tensors[ident] = failed[ident]
