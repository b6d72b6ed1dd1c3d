"""Records of how ops, moves and segments were planned, for people. They print as the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from gt.core.meta import TensorMeta
from gt.core.signatures import Signature
from gt.core.tables import INDENT, PLANS, Column, LogTable, align, count, print_bytes, print_row, short_op
from gt.dispatcher.planner import Plan, TensorMove, moves_in
from gt.sharding.considered_strategies import ConsideredCall, NotedCall, consider, print_layouts
from gt.sharding.spec import ShardingSpec

LABEL = "plan"
COLUMNS = (
    Column("op", 17),
    Column("rule", 32),
    Column("layouts", 24),
    Column("moved", 7, is_number=True),
    Column("scope", 7),
    Column("line", 17, keeps_end=True),
)
SHOWN_OPTIONS = 4  # strategies that were not chosen


class PlannedExchange(NamedTuple):
    """A collective along mesh axes, and the bytes that all workers together receive. `purpose` says what it moves."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    purpose: str


class PlanRecord(NamedTuple):
    """How an op was planned. `calls` are those that were laid out by a rule: one, several if the op was expanded, none
    if it runs on whole tensors. `moves` are those of inputs before the op; `gathered` is an op without a rule, if that
    is the reason."""

    op: str
    calls: tuple[ConsideredCall, ...]
    layouts: str
    exchanges: tuple[PlannedExchange, ...]
    moves: tuple[TensorMove, ...]
    gathered: str
    scope: str
    line: str

    @property
    def rule(self) -> str:
        if len(self.calls) == 1:
            return self.calls[0].rule or "each tensor of a list"
        if self.calls:
            return f"as {count(len(self.calls), 'op')}"
        return "none: inputs are gathered" if self.gathered else "on whole tensors"

    def cells(self) -> tuple[str, ...]:
        layouts = _compact(self.layouts)
        return short_op(self.op), self.rule, layouts, _print_moved(self.exchanges), self.scope, self.line

    def below(self) -> list[str]:
        """Nothing where nothing moves; else the rule, the strategies and the exchanges."""
        if not self.exchanges:
            return []
        rows = [row for call in self.calls for row in _strategy_rows(call, is_named=len(self.calls) > 1)]
        return [*align([*rows, *_exchange_rows(self.exchanges)], numbers=(2,))]

    def __str__(self) -> str:
        return _print(self.cells(), self.below())


class MoveRecord(NamedTuple):
    """Tensors that are moved to other layouts for `purpose`: an op, "gather", "backward"."""

    purpose: str
    moves: tuple[TensorMove, ...]
    exchanges: tuple[PlannedExchange, ...]
    line: str

    def cells(self) -> tuple[str, ...]:
        first = self.moves[0]
        purpose = f"for {short_op(self.purpose)}" if self.purpose not in ("", "redistribute") else ""
        layouts = _compact(print_layouts((first.source,), (first.target,)))
        return "redistribute", purpose, layouts, _print_moved(self.exchanges), "", self.line

    def below(self) -> list[str]:
        return align(_exchange_rows(self.exchanges), numbers=(2,))

    def __str__(self) -> str:
        return _print(self.cells(), self.below())


class SplitRecord(NamedTuple):
    """A segment of `ops` ops that was split into `parts`, which workers replay; `first` and `last` name its ops."""

    segment: int
    ops: int
    parts: tuple[range, ...]
    first: str
    last: str
    scope: str
    line: str

    def cells(self) -> tuple[str, ...]:
        replayed = sum(map(len, self.parts))
        parts = f"{count(len(self.parts), 'part')} of {replayed}, {self.ops - replayed} singly"
        return (
            f"segment of {self.ops} ops",
            f"{short_op(self.first)} to {short_op(self.last)}",
            parts,
            "",
            self.scope,
            self.line,
        )

    def below(self) -> list[str]:
        return []

    def __str__(self) -> str:
        return _print(self.cells(), self.below())


Planned: TypeAlias = PlanRecord | MoveRecord | SplitRecord
PlanObserver: TypeAlias = Callable[[Planned], None]
"""Sees what is planned anew."""


def record_plan(
    signature: Signature,
    metas: Sequence[TensorMeta],
    specs: Sequence[ShardingSpec],
    copies: Sequence[Sequence[ShardingSpec]],
    plan: Plan,
    noted: Sequence[NotedCall],
    scope: str,
    line: str,
) -> PlanRecord:
    """The record of a plan for inputs of these metas and layouts, which have these copies."""
    results = tuple([spec for _, spec in plan.results])
    mesh = results[0].mesh if results else specs[0].mesh
    moves = [
        (position, TensorMove(metas[position], specs[position], spec))
        for position, spec in plan.sources
        if spec is not None and spec not in copies[position]
    ]
    before = [part for position, move in moves for part in exchanges_of(move, f"input {position}")]
    inside = [part for move in moves_in(plan.program) for part in exchanges_of(move)] if plan.program else []
    return PlanRecord(
        signature.op,
        tuple([consider(each, mesh) for each in noted]),
        print_layouts(tuple(specs), results) if mesh.size > 1 else f"worker {mesh.workers[0]}",
        (*before, *inside),
        tuple([move for _, move in moves]),
        plan.gathered,
        scope,
        line,
    )


def record_moves(moves: Sequence[TensorMove], plan: Plan, purpose: str, line: str) -> MoveRecord:
    """The record of a plan that moves tensors in one exchange."""
    several = f"{count(len(moves), 'tensor')}, the first " if len(moves) > 1 else ""
    what = f"{several}{_print_move(moves[0])}"
    parts = [PlannedExchange(each.kind, each.axes, each.nbytes, what) for each in plan.collectives]
    return MoveRecord(purpose, tuple(moves), tuple(parts), line)


def exchanges_of(move: TensorMove, what: str = "") -> list[PlannedExchange]:
    """The collectives of a move. `what` names the tensor."""
    purpose = f"{what} {_print_move(move)}".strip()
    return [PlannedExchange(step.kind, step.axes, nbytes, purpose) for step, nbytes in move.steps() if nbytes]


def _print_move(move: TensorMove) -> str:
    source, target = (f"[{spec}]" for spec in (move.source, move.target))
    if move.source.mesh is not move.target.mesh:
        source, target = f"{source} on {move.source.mesh}", f"{target} on {move.target.mesh}"
    return f"{move.meta}: {source} -> {target}"


def _print(cells: Sequence[str], below: Sequence[str]) -> str:
    return "\n".join([print_row(COLUMNS, [cell or "-" for cell in cells], LABEL), *[INDENT + line for line in below]])


def _compact(layouts: str) -> str:
    return layouts.replace(", ", ",").replace(" + ", "+")


def _print_moved(exchanges: Sequence[PlannedExchange]) -> str:
    return print_bytes(sum(exchange.bytes for exchange in exchanges))


def _strategy_rows(call: ConsideredCall, *, is_named: bool) -> Iterator[tuple[str, ...]]:
    name = f"{call.op}: " if is_named else ""
    if call.rule:
        yield "rule", "", "", f"{name}{call.rule}"
    options = [("chosen", call.chosen), *[("instead", other) for other in call.others[:SHOWN_OPTIONS]]]
    for label, option in options:
        later = f"{print_bytes(option.later)} more later" if option.later else ""
        notes = "; ".join(filter(None, [later, "not as the scope asks" if option.ignores_scope else ""]))
        yield label, option.factors, print_bytes(option.bytes), option.layouts, notes
    if len(call.others) > SHOWN_OPTIONS:
        yield "instead", f"{len(call.others) - SHOWN_OPTIONS} more", "", ""


def _exchange_rows(exchanges: Sequence[PlannedExchange]) -> list[tuple[str, ...]]:
    return [
        ("moves", f"{kind} {' '.join(axes)}".strip(), print_bytes(nbytes), purpose)
        for kind, axes, nbytes, purpose in exchanges
    ]


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
