"""Who may look: everybody who has the token, from this machine, with GET."""

from __future__ import annotations

import secrets
from urllib.parse import urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HAS_TOKEN = "gt.has_token"  # set in the scope of a request
HEALTH = "/health"  # the only path that needs no token
HOSTS = ("127.0.0.1", "localhost", "[::1]")
_METHODS = ("GET", "HEAD")
_SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_NO_TOKEN = (
    "This dashboard needs its token. Open the address that was printed when it was started: it ends with ?token=...\n"
)


class Access:
    """Passes requests on to `app` that may be answered. The page of a `token` in an address sets a cookie and leads to
    the address without it, so that the token is neither on a screen nor in a history."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._cookie = f"gt-dashboard-{port}"  # cookies of one host are those of all its ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "there are no websockets and no lifespan"
        answer = self._refusal(scope) or self._app

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_SECURITY_HEADERS)
            await send(message)

        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not passed on."""
        if not _is_local(Headers(scope=scope).get("host", "")):
            return PlainTextResponse("A dashboard is served at 127.0.0.1 and localhost only.\n", 403)
        if scope["method"] not in _METHODS:
            return PlainTextResponse("A dashboard can only be read.\n", 405, {"allow": ", ".join(_METHODS)})
        if scope["path"] == HEALTH:
            return None
        request = Request(scope)
        given = request.query_params.get("token", "")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        scope[HAS_TOKEN] = any(map(self._is_token, (given, bearer, request.cookies.get(self._cookie, ""))))
        if not scope[HAS_TOKEN]:
            return PlainTextResponse(_NO_TOKEN, 403)
        return self._remember(request) if self._is_token(given) and request.url.path == "/" else None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(errors="replace"), self._token)

    def _remember(self, request: Request) -> Response:
        rest = urlencode([item for item in request.query_params.multi_items() if item[0] != "token"])
        response = RedirectResponse("/?" + rest if rest else "/", 303)
        # Lax: the link in a notebook, a page of another site, leads here with the cookie
        response.set_cookie(self._cookie, self._token.decode(), httponly=True, samesite="lax")
        return response


def _is_local(host: str) -> bool:
    """Whether the name that a browser was given is one of this machine: another name may be one that its owner has
    pointed here, to read the page by a script of his own. The port may be that of a tunnel."""
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal():
        name = host
    return name in HOSTS
