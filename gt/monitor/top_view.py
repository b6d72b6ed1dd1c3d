"""The tables of `gt.scripts.top`: workers, sessions and the mix of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gt.monitor.activity import Activity, WorkerActivity, local_time
from gt.monitor.readable_units import print_bytes

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
_STATE_STYLES = {"running": "green", "exchanging": "yellow", "idle": "dim", "unknown": "dim", "starting": "cyan"}


def draw(activity: Activity, command: str, sort_key: str = "w", *, is_paused: bool = False) -> Group:
    """All tables of a moment."""
    order, value = SORT_KEYS[sort_key]
    heading = Text.assemble(
        ("gt top", "bold"),
        f"  process {activity.pid}  {local_time()}  sorted by {order}",
        ("  paused" if is_paused else "", "bold red"),
        f"\n{command[:160]}",
    )
    keys = Text("q quit  p pause  sort: w worker, b busy, m memory, o ops, t traffic", style="dim")
    rows = sorted(activity.workers, key=value)
    return Group(heading, _workers(rows), _sessions(activity), _mix(activity), keys)


def _workers(rows: list[WorkerActivity]) -> Table:
    table = Table(title="workers", title_justify="left", expand=True)
    for name in ("worker", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("busy", no_wrap=True)
    for name in ("exchanging", "ops/s", "memory", "in/s", "out/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("op", overflow="ellipsis", no_wrap=True, ratio=2)
    table.add_column("line", overflow="ellipsis", no_wrap=True, ratio=2)
    for row in rows:
        state = row.state
        if row.waits_for:
            state = f"waits for {', '.join(map(str, row.waits_for[:4]))} ({row.seconds:.1f} s)"
        elif row.state == "running" and row.seconds >= 1:
            state = f"running {row.seconds:.1f} s"
        table.add_row(
            f"{row.worker} {row.device}",
            Text(state, style=_STATE_STYLES.get(row.state, "")),
            _bar(row.busy),
            f"{row.exchanging:.0%}",
            f"{row.ops_per_second:,.0f}",
            _memory(row),
            print_bytes(row.received_per_second),
            print_bytes(row.sent_per_second),
            escape(row.op),
            escape(row.site),
        )
    return table


def _bar(share: float) -> Text:
    filled = round(share * BAR)
    return Text.assemble(("█" * filled, "green"), ("░" * (BAR - filled), "dim"), f" {share:4.0%}")


def _memory(row: WorkerActivity) -> str:
    return print_bytes(row.nbytes) + (f" of {print_bytes(row.memory)}" if row.memory else "")


def _sessions(activity: Activity) -> Table:
    table = Table(title="sessions", title_justify="left", expand=True)
    for name in ("session", "process"):
        table.add_column(name)
    for name in ("tensors", "memory", "queued", "requests"):
        table.add_column(name, justify="right")
    for session in activity.sessions:
        table.add_row(
            str(session.session),
            str(session.pid),
            f"{session.tensors:,}",
            print_bytes(session.nbytes),
            f"{session.queued:,}",
            f"{session.requests:,}",
        )
    return table


def _mix(activity: Activity) -> Text:
    shown = list(activity.op_mix.items())[:MIX_SHOWN]
    return Text("ops: " + ("  ".join(f"{op} {share:.0%}" for op, share in shown) or "none seen yet"))
