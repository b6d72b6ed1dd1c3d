"""The addresses of a dashboard, and what is at each of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gt.core.program_view import ProgramView
from gt.monitor.timeline_lanes import COLORS, MEANINGS
from gt.monitor.timeline_model import TRANSFER
from gt.version import __version__
from gt.web_dashboard.access import HEALTH, Access
from gt.web_dashboard.metrics import Metrics
from gt.web_dashboard.page_records import KindOfOp, Program
from gt.web_dashboard.watcher import ProgramWatcher

PUSH_SECONDS = 0.2
STALLED_SECONDS = 20.0  # a viewer who reads nothing for this long is dropped
MAX_VIEWERS = 16

_encode_event = msgspec.json.Encoder().encode


class EventStream(Response):
    """Sends what is new since the last time it sent. A slow viewer gets the latest records less often, and nothing
    piles up: the next ones are made when the last ones have gone."""

    media_type = "text/event-stream"

    def __init__(self, watcher: ProgramWatcher) -> None:
        super().__init__()
        self._watcher = watcher
        self._versions: dict[str, int] = {}
        self._number = 0
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._watcher.viewers += 1
        gone = asyncio.ensure_future(_wait_for_end(receive))
        ended = asyncio.ensure_future(self._watcher.ended.wait())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not gone.done():
                self._watcher.look()
                await _send_in_time(send, b"".join(self._news()), more=True)
                await asyncio.wait((gone, ended), timeout=PUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    await _send_in_time(send, _event("ended", b"{}"), more=False)
                    return
        except TimeoutError:
            raise ConnectionError("a viewer of the dashboard reads nothing") from None  # ends the connection
        finally:
            self._watcher.viewers -= 1
            for task in (gone, ended):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _news(self) -> Iterator[bytes]:
        for name, (version, data) in self._watcher.published.items():
            if self._versions.get(name) != version:
                self._versions[name] = version
                yield _event(name, data)
        part = self._watcher.timeline.part_after(self._number)
        self._number = part.number
        yield _event("timeline", _encode_event(part))


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(name: str, data: bytes) -> bytes:
    """JSON has no line breaks, so the data is one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


async def _send_in_time(send: Send, body: bytes, more: bool) -> None:
    async with asyncio.timeout(STALLED_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": more})


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
RECORDS = ("status", "sessions", "memory", "tensors", "traffic", "failures")
_ASSETS = Path(__file__).parent / "assets"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_encode = msgspec.json.Encoder().encode


def make_app(view: ProgramView, watcher: ProgramWatcher, token: str, port: int) -> ASGIApp:
    """All handlers are coroutines, because any other would be run by a separate thread. Assets are read once."""
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
