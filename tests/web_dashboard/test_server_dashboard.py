"""`python -m gt.server --dashboard`: the page of a server, and how it ends."""

import re
import signal
import socket
import time
from contextlib import closing

import pytest

import gt
from gt.core.errors import SessionError
from tests.subprocesses import finish, running, start_interpreter
from tests.web_dashboard.requests import SECONDS, ask, read_until

PROMPT = 5.0  # seconds in which a server ends


def read_address(server):
    """The port and the token that a server prints."""
    for line in server.stderr:
        if found := re.search(r"dashboard at http://127.0.0.1:(\d+)/\?token=(\S+)", line):
            return int(found[1]), found[2]
    raise AssertionError("the server has printed no address")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_promptly_with_an_open_page(number):
    server = start_interpreter("-m", "gt.server", "-p", "0", "--dashboard", "0")
    with running(server):
        port, token = read_address(server)
        with closing(socket.create_connection(("127.0.0.1", port), SECONDS)) as viewer:
            viewer.sendall(f"GET /events?token={token} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            read_until(viewer, b"event: timeline")
            began = time.monotonic()
            server.send_signal(number)
            read_until(viewer, b"event: ended")
        assert finish(server, PROMPT)[0] == 0
        assert time.monotonic() - began < PROMPT


def test_a_port_that_is_taken_ends_the_server_with_a_message():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, _, err = finish(start_interpreter("-m", "gt.server", "-p", "0", "--dashboard", port))
    assert code == 1
    assert f"127.0.0.1:{port}" in err and "choose another port" in err


def test_a_client_of_a_server_is_told_where_its_dashboard_is(server_of_two):
    gt.connect(f"localhost:{server_of_two}")
    try:
        with pytest.raises(SessionError, match=r"gt\.server --dashboard 8787"):
            gt.dashboard()
    finally:
        gt.shutdown()


def test_health_of_a_server():
    server = start_interpreter("-m", "gt.server", "-p", "0", "--dashboard", "0")
    with running(server):
        assert ask(read_address(server)[0], "/health").body == b"ok"
