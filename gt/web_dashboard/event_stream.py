"""Server-sent events for one viewer: the records that have changed, a few times a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gt.web_dashboard.watcher import ProgramWatcher

PUSH_SECONDS = 0.2
STALLED_SECONDS = 20.0  # after which a viewer who reads nothing is given up
MAX_VIEWERS = 16

_encode = msgspec.json.Encoder().encode


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
        yield _event("timeline", _encode(part))


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(name: str, data: bytes) -> bytes:
    """JSON has no line breaks, so the data is one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


async def _send_in_time(send: Send, body: bytes, more: bool) -> None:
    async with asyncio.timeout(STALLED_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": more})
