"""Who may look at a dashboard, asked of a real one."""

import socket

import pytest

import gt
from tests.web_dashboard.requests import SECONDS, ask, read, token_of


@pytest.fixture(scope="module")
def shared_board():
    """A dashboard for all tests of this module."""
    gt.init()
    yield gt.dashboard()
    gt.shutdown()


@pytest.fixture
def board(shared_board):
    return shared_board


@pytest.mark.parametrize("path", ["/", "/events", "/metrics", "/api/status.json", "/assets/main.js", "/nothing"])
def test_without_the_token_there_is_nothing(board, path):
    for answer in (ask(board.port, path), ask(board.port, path + "?token=wrong"), ask(board.port, path + "?token=")):
        assert answer.status == 403
        assert b"token" in answer.body


@pytest.mark.parametrize("given", ["wrong", "", "é", "x" * 5000])
def test_a_wrong_token_in_a_header_or_cookie_is_refused(board, given):
    name = f"gt-dashboard-{board.port}"
    for headers in ({"Authorization": f"Bearer {given}"}, {"Cookie": f"{name}={given}"}):
        encoded = {key: value.encode("latin-1") for key, value in headers.items()}
        assert ask(board.port, "/api/status.json", **encoded).status == 403


def test_health_needs_no_token_and_tells_nothing(board):
    answer = ask(board.port, "/health")
    assert (answer.status, answer.body) == (200, b"ok")


def test_the_address_with_the_token_sets_a_cookie_and_leads_to_one_without(board):
    answer = ask(board.port, f"/?token={token_of(board)}")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    page = ask(board.port, "/", Cookie=cookie.partition(";")[0])
    assert page.status == 200 and b"<title>GT dashboard" in page.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_a_dashboard_can_only_be_read(board, method):
    answer = ask(board.port, f"/api/status.json?token={token_of(board)}", method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8787", "127.0.0.1.evil.example", "", "localhost:x"])
def test_another_name_of_this_machine_is_refused(board, host):
    """A page of somebody else, whose name its owner points here, must not read this one."""
    assert ask(board.port, f"/api/status.json?token={token_of(board)}", Host=host).status == 403
    assert ask(board.port, "/health", Host=host).status == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1", "[::1]:80"])
def test_the_port_may_be_that_of_a_tunnel(board, host):
    assert ask(board.port, f"/api/status.json?token={token_of(board)}", Host=host).status == 200


@pytest.mark.parametrize("path", ["/", "/assets/main.js", "/api/status.json", "/health", "/nothing"])
def test_every_answer_has_the_headers_of_a_page_that_runs_nothing_foreign(board, path):
    headers = read(board, path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    ["/assets/../app.py", "/assets/..%2fapp.py", "/assets/%2e%2e/app.py", "//etc/passwd", "/assets/", "/api/x.json"],
)
def test_nothing_but_the_assets_is_given(board, path):
    with socket.create_connection(("127.0.0.1", board.port), SECONDS) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {token_of(board)}"
        connection.sendall(head.encode() + b"\r\n\r\n")
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert data.startswith(b"HTTP/1.1 404")
