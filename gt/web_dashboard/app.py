"""The addresses of a dashboard, and what is at each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gt.core.program_view import ProgramView
from gt.monitor.timeline_colors import COLORS, MEANINGS
from gt.monitor.timeline_model import TRANSFER
from gt.version import __version__
from gt.web_dashboard.access import HEALTH, Access
from gt.web_dashboard.event_stream import MAX_VIEWERS, EventStream
from gt.web_dashboard.metrics import Metrics
from gt.web_dashboard.records import KindOfOp, Program
from gt.web_dashboard.watcher import ProgramWatcher

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
RECORDS = ("status", "sessions", "memory", "tensors", "traffic", "failures")
_ASSETS = Path(__file__).parent / "assets"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_encode = msgspec.json.Encoder().encode


def make_app(view: ProgramView, watcher: ProgramWatcher, token: str, port: int) -> ASGIApp:
    """All handlers are coroutines, because any other would be run by a thread of its own. Assets are read once."""
    addresses = _Addresses(view, watcher)
    routes = [
        Route(HEALTH, addresses.health),
        Route("/events", addresses.events),
        Route("/metrics", addresses.metrics),
        Route("/api/program.json", addresses.program),
        Route("/api/timeline.json", addresses.timeline),
        Route("/api/{name}.json", addresses.record),
        *[Route(f"/assets/{path.name}", _asset(path)) for path in sorted(_ASSETS.iterdir())],
        Route("/", _asset(_ASSETS / "index.html")),
    ]
    return Access(Starlette(routes=routes), token, port)


class _Addresses:
    def __init__(self, view: ProgramView, watcher: ProgramWatcher) -> None:
        self._watcher = watcher
        self._metrics = Metrics(view)
        kinds = tuple(KindOfOp(kind, MEANINGS[kind], color) for kind, color in COLORS.items() if kind != TRANSFER)
        self._program = _encode(Program(os.getpid(), _command(), __version__, kinds))

    async def health(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    async def events(self, _: Request) -> Response:
        if self._watcher.viewers >= MAX_VIEWERS:
            return PlainTextResponse(f"{MAX_VIEWERS} viewers look at this dashboard already.\n", 503)
        return EventStream(self._watcher)

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def program(self, _: Request) -> Response:
        return _json(self._program)

    async def timeline(self, _: Request) -> Response:
        self._watcher.look()
        return _json(_encode(self._watcher.timeline.part_after(0)))

    async def record(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in RECORDS:
            return PlainTextResponse(f"There are {', '.join(RECORDS)}, program and timeline.\n", 404)
        self._watcher.look()
        return _json(self._watcher.published[name][1])


def _asset(path: Path) -> Handler:
    """Gives a file that is read now: nothing of a request becomes part of a path."""
    data, media_type = path.read_bytes(), _MEDIA_TYPES[path.suffix]

    async def give(_: Request) -> Response:
        return Response(data, media_type=media_type)

    return give


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _command() -> str:
    return " ".join(sys.orig_argv)[:1000]
