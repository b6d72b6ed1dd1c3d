"""Requests to a dashboard, as browsers and others send them."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from gt.web_dashboard.http_server import Dashboard

SECONDS = 20


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def token_of(board: Dashboard) -> str:
    return parse_qs(urlsplit(board.url).query)["token"][0]


def ask(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


def read(board: Dashboard, path: str) -> Answer:
    """The answer to somebody who has the token."""
    return ask(board.port, path, Authorization=f"Bearer {token_of(board)}")


@contextlib.contextmanager
def viewing(board: Dashboard) -> Iterator[socket.socket]:
    """A viewer's connection, on which the events of the program arrive."""
    with socket.create_connection(("127.0.0.1", board.port), SECONDS) as viewer:
        request = f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token_of(board)}\r\n\r\n"
        viewer.sendall(request.encode())
        yield viewer


def read_until(viewer: socket.socket, text: bytes) -> bytes:
    """What a viewer gets, until some text is in it."""
    data = b""
    while text not in data:
        part = viewer.recv(1 << 16)
        assert part, f"the connection has ended before {text!r} came; it gave {data[-400:]!r}"
        data += part
    return data
