"""`/health` of a server: what it answers, and what strangers cannot do with it."""

import contextlib
import re
import socket
import time

import pytest

import gt
from gt.server import health
from gt.server.health import HealthEndpoint
from tests.subprocesses import running, start_interpreter, wait_until


@pytest.fixture
def endpoint():
    turns = {"at": time.monotonic()}
    opened = HealthEndpoint("127.0.0.1", 0, lambda: turns["at"])
    opened.turns = turns
    yield opened
    opened.close()


def ask(port, request=b"GET /health HTTP/1.1\r\nHost: pod\r\n\r\n"):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            return answer.read().decode()


def test_a_server_that_turns_is_well(endpoint):
    answer = ask(endpoint.port)
    assert answer.startswith("HTTP/1.1 200 OK\r\n") and answer.endswith("\r\n\r\nok\n")


def test_a_server_that_does_not_turn_is_not(endpoint):
    endpoint.turns["at"] -= health.STALLED_SECONDS
    assert ask(endpoint.port).startswith("HTTP/1.1 503 ")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("HEAD /health HTTP/1.1", 200),
        ("GET /health?x=1 HTTP/1.0", 200),
        ("POST /health HTTP/1.1", 405),
        ("GET / HTTP/1.1", 404),
        ("GET /healthy HTTP/1.1", 404),
        ("nonsense", 405),
        ("", 405),
    ],
)
def test_other_requests_are_refused(endpoint, request_line, status):
    assert ask(endpoint.port, f"{request_line}\r\n\r\n".encode()).startswith(f"HTTP/1.1 {status} ")


def test_a_request_without_an_end_is_given_up(endpoint):
    assert ask_or_nothing(endpoint.port, b"x" * (2 * health.MAX_REQUEST)) == ""


def test_silent_connections_do_not_keep_others_out(endpoint):
    with contextlib.ExitStack() as stack:
        for _ in range(2 * health.MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port)))
        since = time.monotonic()
        wait_until(lambda: ask_or_nothing(endpoint.port).endswith("ok\n"), what="an answer beside the silent ones")
        assert time.monotonic() - since < health.REQUEST_SECONDS / 2


def ask_or_nothing(port, *request):
    try:
        return ask(port, *request)
    except ConnectionError:
        return ""


def test_a_port_in_use_is_an_error(endpoint):
    with pytest.raises(gt.SettingsError, match="--health-port: cannot listen at 127.0.0.1.*0 for any free one"):
        HealthEndpoint("127.0.0.1", endpoint.port, time.monotonic)


def test_a_server_answers_until_it_ends():
    server = start_interpreter("-m", "gt.server", "-p", "0", "--health-port", "0")
    with running(server):
        lines = iter(server.stderr.readline, "")
        port = int(next(found[1] for line in lines if (found := re.search(r":(\d+)/health", line))))
        assert ask(port).endswith("ok\n")
        server.terminate()
        assert server.wait(10) == 0
    with pytest.raises(ConnectionError):
        ask(port)
