"""Starts a dashboard. The packages that it needs are those of an extra, and are loaded here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gt.core.environment import load_extra
from gt.core.program_view import ProgramView

if TYPE_CHECKING:
    from gt.web_dashboard.http_server import Dashboard

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")


def start_dashboard(
    view: ProgramView, port: int = 0, token: str = "", note_threads: Callable[[int], None] = lambda change: None
) -> Dashboard:
    """Serve a dashboard at a port of this machine (0: any free one). Without a `token` a new one is made.
    `note_threads` is called when the number of threads changes, by a thread that runs before and after. Raises
    SettingsError if it cannot be served."""
    for package in _PACKAGES:
        load_extra(package, "dashboard", "a dashboard")
    server = load_extra("gt.web_dashboard.http_server", "dashboard", "a dashboard")
    dashboard: Dashboard = server.Dashboard(view, port, token, note_threads)
    return dashboard
