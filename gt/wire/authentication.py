"""Admits to a server only peers that have one of its keys."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from zmq.utils import z85

from gt.core.errors import SettingsError
from gt.wire.refusals import Refusals
from gt.wire.server_keys import AUTHORIZED, ServerKeys, read_authorized

log = logging.getLogger("gt.wire")
_ENDPOINT = "inproc://zeromq.zap.01"
_STOP = "inproc://gt-authenticator"
OWN_USER = "this machine"  # the name of the key that a server writes for its own user
_TICK = 3_000_000_000  # nanoseconds in which two changes of a directory may have the same time
_SHOWN = 8  # characters of a key in a log


class Authenticator:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27) in its own thread. ZeroMQ asks during the handshake
    of a peer, before it reads any message. The thread also calls `look` when the descriptor `watched` is readable."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ServerKeys,
        refusals: Refusals,
        watched: int,
        look: Callable[[], None],
    ) -> None:
        self._keys = AcceptedKeys(keys.member, keys.directory)
        self._refusals = refusals
        self._watched = watched
        self._look = look
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
        poller.register(self._watched, zmq.POLLIN)
        while self._stopped not in (ready := dict(poller.poll())):
            if self._watched in ready:
                self._look()
            if self._requests in ready:
                self._requests.send_multipart(self._answer(self._requests.recv_multipart()))

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        reply = authenticate(request, self._keys)
        if reply[2] != b"200":
            address = request[3].decode(errors="replace") if len(request) > 3 else "an unknown address"
            shown = z85.encode(request[6])[:_SHOWN].decode() if len(request) > 6 and len(request[6]) == 32 else "none"
            self._refusals.note("key", address, f"{address}: its key ({shown}...) is not one that this server admits")
        return reply

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        for socket in (self._requests, self._stop, self._stopped):
            socket.close(linger=0)


class AcceptedKeys:
    """The public keys that a server admits: the one that it has written for its user, and those of the directory of
    client keys, which is read again when it has changed."""

    def __init__(self, member: str, directory: Path | None) -> None:
        self._member = z85.decode(member.encode())
        self._directory = directory
        self._authorized: dict[bytes, str] = {}
        self._changed = 0

    def name(self, public: bytes) -> str | None:
        """The name of a key; None if it is not admitted. While the directory cannot be used, none of its keys is."""
        if public == self._member:
            return OWN_USER
        if self._directory is None:
            return None
        try:
            changed = (self._directory / AUTHORIZED).stat().st_mtime_ns
            if changed != self._changed:
                found = read_authorized(self._directory)
                self._authorized = {z85.decode(key.encode()): name for key, name in found.items()}
                self._changed = changed if time.time_ns() - changed > _TICK else 0  # it may still change unnoticed
        except (SettingsError, OSError, ValueError, KeyError) as error:
            log.warning("no client key of %s is admitted: %s", self._directory, error)
            self._authorized, self._changed = {}, 0
        return self._authorized.get(public)


def authenticate(request: Sequence[bytes], keys: AcceptedKeys) -> list[bytes]:
    """The reply to a request, which has version, number, domain, address, identity, mechanism and credentials."""
    version, number = (*request[:2], b"", b"")[:2]
    name = keys.name(request[6]) if len(request) == 7 and request[5] == b"CURVE" else None
    status = (b"200", b"OK", name.encode()) if name else (b"400", b"this key is not one that the server admits", b"")
    return [version or b"1.0", number, *status, b""]
