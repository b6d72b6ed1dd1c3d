"""Exchanges that go on while the worker computes: begun by their command, finished when their tensors are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gt.core.messages import RunOp
from gt.worker.exchange.interface import Exchanging, MoveTask, Work


class BegunExchange(NamedTuple):
    """A command whose only exchange has begun. `computation` waits for the results of `work`."""

    command: RunOp
    computation: Exchanging
    tasks: Sequence[MoveTask]
    work: Work


class OverlappedExchanges:
    """The exchanges that have begun and are not finished, by the ids of the tensors that they give. `finish_begun`
    waits for one and stores its tensors."""

    def __init__(self, finish_begun: Callable[[BegunExchange], None]) -> None:
        self._begun: dict[int, BegunExchange] = {}
        self._finish_begun = finish_begun

    def __bool__(self) -> bool:
        return bool(self._begun)

    def add(self, begun: BegunExchange) -> None:
        self._begun.update(dict.fromkeys(begun.command.outputs, begun))

    def finish(self, idents: Iterable[int]) -> bool:
        """Finish the exchanges that give some tensors. Returns whether there were any."""
        found = {id(begun): begun for ident in idents if (begun := self._begun.get(ident)) is not None}
        for begun in found.values():
            for ident in begun.command.outputs:
                del self._begun[ident]
            self._finish_begun(begun)
        return bool(found)

    def finish_all(self) -> None:
        """Finish all exchanges, before a command that may read any tensor."""
        if self._begun:
            self.finish(list(self._begun))
