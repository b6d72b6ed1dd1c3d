"""`python -m gt.scripts.sessions`: the sessions of a server, which may be on another machine; ends them too."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from gt.core.errors import ProtocolError, ServerLost
from gt.core.ids import SESSION_SHIFT
from gt.core.messages import EndSession, Goodbye, ReadSessions, Refused, Rejected, SessionsRead
from gt.core.settings import Settings, parse_address, read_settings
from gt.core.signatures import as_text
from gt.core.tables import SessionList
from gt.scripts.command_line import run_tool
from gt.wire.server_keys import keys_directory
from gt.wire.socket_channel import SocketChannel

_SECONDS = 10.0
_MAX_REASON = 1000  # characters


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gt.scripts.sessions", description="List the sessions of a server, or end some of them."
    )
    parser.add_argument("--server", default="", help="host:port (default: GT_SERVER, or localhost:12345)")
    parser.add_argument("--end", type=_session_id, nargs="+", default=[], metavar="ID", help="end these sessions")
    parser.add_argument("--reason", default="", help="what the programs that are ended are told")
    parser.add_argument("--json", action="store_true", help="a JSON object for each session, one on each line")
    options = parser.parse_args()
    return run_tool("gt.scripts.sessions", lambda: _run(options))


def _session_id(text: str) -> int:
    """An id that a message can hold."""
    if not 0 <= (ident := int(text)) < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text} is not the id of a session; list them without --end")
    return ident


def _run(options: argparse.Namespace) -> int:
    settings = read_settings()
    server = options.server or settings.server or "localhost:12345"
    ends = [EndSession(0, ident, as_text(options.reason[:_MAX_REASON])) for ident in options.end]
    requests: list[EndSession | ReadSessions] = [*ends] if ends else [ReadSessions(0)]
    found = [session for listed in ask(server, settings, requests) for session in listed]
    if options.json:
        for session in found:
            print(msgspec.json.encode({**msgspec.structs.asdict(session), "held": dict(session.held)}).decode())
    elif options.end:
        for session in found:
            print(f"session {session.session} (pid {session.pid} on {session.host}) was ended")
    else:
        print(SessionList(found))
    return 0


def ask(server: str, settings: Settings, requests: list[EndSession | ReadSessions]) -> list[SessionList]:
    """The answers of the server at an address."""
    host, port = parse_address(server)
    keys = None if settings.insecure else keys_directory(settings.keys)
    channel = SocketChannel(f"tcp://{host}:{port}", None, keys, settings.heartbeat_timeout)
    try:
        welcome = channel.greet(0, min(settings.timeout, _SECONDS))
        first = (welcome.ident << SESSION_SHIFT) + 1
        numbered = [msgspec.structs.replace(each, request=first + number) for number, each in enumerate(requests)]
        channel.send(numbered, [])  # type: ignore[arg-type]
        found: list[SessionList] = []
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            for received in channel.receive():
                if isinstance(received.answer, SessionsRead):
                    found.append(SessionList(received.answer.sessions))
                elif isinstance(received.answer, Refused | Rejected):
                    raise ProtocolError(received.answer.reason)
            if len(found) == len(requests):
                channel.send([Goodbye()], [])
                return found
            channel.wait()
    finally:
        channel.close()
    raise ServerLost(f"the server at {server} has not answered within {_SECONDS:g} s")


if __name__ == "__main__":
    sys.exit(main())
