"""Admits to a server only peers that have the server's member key."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import zmq
from zmq.utils import z85

_ENDPOINT = "inproc://zeromq.zap.01"
_STOP = "inproc://gt-authenticator"


class Authenticator:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27) in a thread of its own. ZeroMQ asks during the handshake
    of a peer, before it reads any message."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], member: str) -> None:
        self._member = z85.decode(member.encode())
        self._requests = context.socket(zmq.REP)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind(_ENDPOINT)
        self._stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stopped.bind(_STOP)
        self._stop.connect(_STOP)
        self._thread = threading.Thread(target=self._serve, name="gt-authenticator", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while self._stopped not in dict(poller.poll()):
            request = self._requests.recv_multipart()
            self._requests.send_multipart(authenticate(request, self._member))

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        for socket in (self._requests, self._stop, self._stopped):
            socket.close(linger=0)


def authenticate(request: Sequence[bytes], member: bytes) -> list[bytes]:
    """The reply to a request, which has version, number, domain, address, identity, mechanism and credentials."""
    version, number = (*request[:2], b"", b"")[:2]
    accepted = tuple(request[5:]) == (b"CURVE", member)
    status = (b"200", b"OK", b"member") if accepted else (b"400", b"these are not the keys of this server", b"")
    return [version or b"1.0", number, *status, b""]
