"""The tables of `gt.scripts.top`: workers, sessions, and the mix of ops and of lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gt.core.tables import print_bytes, short_site
from gt.monitor.activity import Activity, WorkerActivity, local_time

SORT_KEYS: dict[str, tuple[str, Callable[[WorkerActivity], Any]]] = {
    "w": ("worker", lambda row: row.worker),
    "b": ("busy", lambda row: -row.busy),
    "m": ("memory", lambda row: -row.nbytes),
    "o": ("ops", lambda row: -row.ops_per_second),
    "t": ("traffic", lambda row: -(row.received_per_second + row.sent_per_second)),
}
"""By key, the name of an order and the value that workers are sorted by."""

BAR = 10  # characters
MIX_SHOWN = 8
_STATE_STYLES = {
    "running": "green",
    "exchanging": "yellow",
    "stopped": "bold red",
    "idle": "dim",
    "unknown": "dim",
    "starting": "cyan",
}
_SESSIONS_WIDTH = 64  # width of all columns of the sessions
_AROUND = 12  # lines of a screen that are not of workers
_LOOK: dict[str, Any] = {"title_justify": "left", "box": None, "padding": (0, 2, 0, 0), "header_style": "bold dim"}


class _Column(NamedTuple):
    """A column of the workers. Where the screen is too narrow for all, those of the highest `rank` are left out."""

    name: str
    width: int
    rank: int
    cell: Callable[[WorkerActivity], str | Text]
    is_number: bool = False
    is_flexible: bool = False


def draw(
    activity: Activity,
    command: str,
    sort_key: str = "w",
    *,
    width: int,
    height: int | None = None,
    is_paused: bool = False,
) -> Group:
    """All tables of a moment, for a screen of `width` characters; None is a height without an end."""
    order, value = SORT_KEYS[sort_key]
    heading = Text.assemble(
        ("gt top", "bold"),
        f"  process {activity.pid}  {local_time()}  sorted by {order}",
        ("  paused" if is_paused else "", "bold red"),
        no_wrap=True,
        overflow="ellipsis",
    )
    program = Text(command, no_wrap=True, overflow="ellipsis")
    keys = Text("q quit  p pause  sort: w worker, b busy, m memory, o ops, t traffic", style="dim")
    keys.no_wrap, keys.overflow = True, "ellipsis"
    rows = sorted(activity.workers, key=value)
    room = (
        len(rows) if height is None else max(height - _AROUND - len(activity.sessions) - 2 * bool(activity.refused), 1)
    )
    parts: list[RenderableType] = [heading, program, _workers(rows[:room], width)]
    if rows[room:]:
        parts.append(Text(_describe_rest(rows[room:]), style="dim"))
    parts.append(_sessions(activity, width))
    if activity.refused:
        parts.append(Text(_describe_refused(activity.refused), style="yellow", no_wrap=True, overflow="ellipsis"))
    return Group(*parts, _mix("ops", activity.op_mix), _mix("lines", activity.line_mix), keys)


def _describe_refused(counts: Mapping[str, int]) -> str:
    return "\nrefused  " + "  ".join(f"{kind} {count:,}" for kind, count in sorted(counts.items()))


def _describe_rest(rows: list[WorkerActivity]) -> str:
    states = Counter(row.state for row in rows)
    return f"and {len(rows)} more: " + ", ".join(f"{number} {state}" for state, number in states.most_common())


def _workers(rows: list[WorkerActivity], width: int) -> Table:
    table = Table(title="\nworkers", **_LOOK)
    shown = _fitting(width)
    for column in shown:
        table.add_column(
            column.name,
            justify="right" if column.is_number else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=column.width,
            ratio=1 if column.is_flexible else None,
        )
    for row in rows:
        table.add_row(*[column.cell(row) for column in shown])
    return table


def _fitting(width: int) -> list[_Column]:
    """The columns that there is room for, in their order."""
    shown: list[_Column] = []
    for column in sorted(_COLUMNS, key=lambda column: column.rank):
        if sum(each.width + 2 for each in [*shown, column]) > width:
            break
        shown.append(column)
    return [column for column in _COLUMNS if column in shown]


def _state(row: WorkerActivity) -> Text:
    state = row.state
    if row.waits_for:
        state = f"waits for {', '.join(map(str, row.waits_for[:4]))} {row.seconds:.1f} s"
    elif row.state in ("running", "stopped") and row.seconds >= 1:
        state = f"{row.state} {row.seconds:.1f} s"
    return Text(state, style=_STATE_STYLES.get(row.state, ""))


def _bar(row: WorkerActivity) -> Text:
    filled = round(row.busy * BAR)
    return Text.assemble(("█" * filled, "green"), ("░" * (BAR - filled), "dim"))


def _memory(row: WorkerActivity) -> str:
    return print_bytes(row.nbytes) + (f" of {print_bytes(row.memory)}" if row.memory else "")


_COLUMNS = (
    _Column("worker", 6, 0, lambda row: f"{row.worker} {row.device}"),
    _Column("state", 9, 1, _state),
    _Column("", BAR, 8, _bar),
    _Column("busy", 4, 2, lambda row: f"{row.busy:.0%}", is_number=True),
    _Column("exch.", 5, 4, lambda row: f"{row.exchanging:.0%}", is_number=True),
    _Column("ops/s", 7, 5, lambda row: f"{row.ops_per_second:,.0f}", is_number=True),
    _Column("memory", 18, 9, _memory, is_number=True),
    _Column("in/s", 7, 7, lambda row: print_bytes(row.received_per_second), is_number=True),
    _Column("out/s", 7, 10, lambda row: print_bytes(row.sent_per_second), is_number=True),
    _Column("op", 14, 6, lambda row: Text(row.op.removeprefix("aten.")), is_flexible=True),
    _Column("line", 12, 3, lambda row: Text(short_site(row.site)), is_flexible=True),
)


def _sessions(activity: Activity, width: int) -> Table:
    table = Table(title="\nsessions", **_LOOK)
    is_narrow = width < _SESSIONS_WIDTH
    for name in ("session", "tensors", "memory", "queued", *(() if is_narrow else ("requests", "process"))):
        table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
    for session in activity.sessions:
        cells = [f"{session.session}", f"{session.tensors:,}", print_bytes(session.nbytes), f"{session.queued:,}"]
        table.add_row(*cells, *([] if is_narrow else [f"{session.requests:,}", f"{session.pid}"]))
    return table


def _mix(name: str, mix: Mapping[str, float]) -> Text:
    shown = list(mix.items())[:MIX_SHOWN]
    text = "  ".join(f"{short_site(each)} {share:.0%}" for each, share in shown) or "none seen yet"
    return Text(f"{name}: {text}", no_wrap=True, overflow="ellipsis")
