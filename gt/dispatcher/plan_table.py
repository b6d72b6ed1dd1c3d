"""The table of GT_DEBUG_DISPATCHER: each op, move and segment that is planned anew."""

from __future__ import annotations

from gt.core.log_tables import PLANS, LogTable
from gt.dispatcher.plan_records import COLUMNS, LABEL, MoveRecord, Planned, PlanObserver, PlanRecord
from gt.dispatcher.planner import TensorMove


def plan_observer() -> PlanObserver | None:
    """An observer that writes the table; None if nobody reads it, so that nothing is recorded."""
    table = LogTable(PLANS, LABEL, COLUMNS)
    return PlanTable(table) if table.is_on else None


class PlanTable:
    """Writes records as rows. The moves of an op's inputs are part of its row, and are not written again."""

    def __init__(self, table: LogTable) -> None:
        self._table = table
        self._moved: tuple[TensorMove, ...] = ()

    def __call__(self, record: Planned) -> None:
        if isinstance(record, PlanRecord):
            self._moved = record.moves
        if isinstance(record, MoveRecord) and set(record.moves).issubset(self._moved):
            return
        self._table.add(record.cells(), record.below())
