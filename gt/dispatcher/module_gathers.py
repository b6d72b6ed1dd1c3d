"""Gathers the cut parameters of a module together, when the module begins, instead of one by one as its ops need them.

The client says which module begins, forward or backward, and which one is likely to follow. The layouts in which a
module needs its parameters are those in which its ops used them in earlier runs; a copy that no op of a run has used is
not made for the next one. Where exchanges go on while workers
compute, the parameters of the next module are gathered ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gt.core.ids import session_of
from gt.core.messages import BeginModule
from gt.dispatcher.planner import TensorMove
from gt.dispatcher.redistribution import Redistributor, copies_to_drop
from gt.dispatcher.session_limits import fits
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.wire.codec import Buffer


class ModuleGathers:
    """Gathers the parameters of each module that begins."""

    def __init__(self, state: State, redistributor: Redistributor) -> None:
        self._state = state
        self._redistributor = redistributor

    def begin(self, session: SessionRecord, begin: BeginModule, _: Buffer | None) -> None:
        self._state.set_running_module(session, begin.module, begin.parameters)
        self._state.forget_unused(session, begin.module)
        self._gather(session, begin.module, begin.parameters, begin.site)
        self._state.expect_uses(session, begin.module, self._copies(session, begin.module, begin.parameters))
        if begin.next_parameters:
            self._gather(session, begin.next_module, begin.next_parameters, begin.site, ahead=True)

    def _gather(
        self, session: SessionRecord, module: int, parameters: Sequence[int], site: int, *, ahead: bool = False
    ) -> None:
        """Copy the parameters of a module into the layouts it needs. Moves that can be one exchange go together."""
        state = self._state
        together: dict[tuple[object, ...], list[tuple[int, int, TensorMove]]] = {}
        for position, move in _moves(session, module):
            ident = parameters[position] if position < len(parameters) else 0
            if self._lacks(ident, move) and (not ahead or self._state.overlaps(move.target.mesh)):
                copy = state.new_id(session)
                state.add_copy(ident, move.target, copy)
                together.setdefault(move.exchange, []).append((ident, copy, move))
        for moves in together.values():
            self._redistributor.move_together(session, moves, "gather", site)

    def _copies(self, session: SessionRecord, module: int, parameters: Sequence[int]) -> dict[int, int]:
        """The copies that a module needs and that are there, by the position of the parameter."""
        copies = self._state.copies
        return {
            position: copies[parameters[position]][move.target]
            for position, move in _moves(session, module)
            if position < len(parameters) and move.target in copies.get(parameters[position], {})
        }

    def _lacks(self, ident: int, move: TensorMove) -> bool:
        """Whether a move applies to a tensor, its workers are there, its copy does not exist yet, and fits without
        dropping other copies."""
        state, tensor, limit = self._state, self._state.tensors.get(ident), self._state.copy_limit
        if tensor is None or tensor.meta != move.meta or tensor.spec is not move.source:
            return False
        if move.target in state.copies.get(ident, {}) or any(map(state.was_lost, move.target.mesh.workers)):
            return False
        if not fits(state, session_of(ident), TensorRecord.of(move.meta, move.target).nbytes, 0):
            return False
        return limit is None or not copies_to_drop(state, limit, tensor, move.target, ())


def _moves(session: SessionRecord, module: int) -> Iterable[tuple[int, TensorMove]]:
    """The moves by which ops of a module have copied its parameters, with the positions of these."""
    return session.modules[module].moves.items() if module in session.modules else ()
