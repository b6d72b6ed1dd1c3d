"""Gathers that arrive while the worker computes: begun by their command, finished when their tensors are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gt.core.messages import RunOp
from gt.worker.exchange.interface import Exchanging, MoveTask, Work


class BegunGather(NamedTuple):
    """A command whose only exchange has begun. `computation` waits for the results of `work`."""

    command: RunOp
    computation: Exchanging
    tasks: Sequence[MoveTask]
    work: Work


class OverlappedGathers:
    """The gathers that have begun and are not finished, by the ids of the tensors that they give. `finish_gather` waits
    for the exchange of one and stores its tensors."""

    def __init__(self, finish_gather: Callable[[BegunGather], None]) -> None:
        self._begun: dict[int, BegunGather] = {}
        self._finish_gather = finish_gather

    def __bool__(self) -> bool:
        return bool(self._begun)

    def add(self, gather: BegunGather) -> None:
        self._begun.update(dict.fromkeys(gather.command.outputs, gather))

    def finish(self, idents: Iterable[int]) -> bool:
        """Finish the gathers that give some tensors. Returns whether there were any."""
        found = {id(gather): gather for ident in idents if (gather := self._begun.get(ident)) is not None}
        for gather in found.values():
            for ident in gather.command.outputs:
                del self._begun[ident]
            self._finish_gather(gather)
        return bool(found)

    def finish_all(self) -> None:
        """Finish all gathers, before a command that may read any tensor."""
        if self._begun:
            self.finish(list(self._begun))
