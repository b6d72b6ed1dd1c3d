"""Connections between a dispatcher and its peers, which know when they are lost.

A connection is never made again by itself: a message may have been lost with it, and nobody could tell which. So the
loss of a connection is the loss of the peer, and is told at both ends. A peer that comes back comes as a new one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from gt.core.errors import ConnectionLost, SettingsError
from gt.wire.authentication import Authenticator
from gt.wire.codec import Frame
from gt.wire.descriptors import limit, raise_limit, shut
from gt.wire.keys import MemberKeys, ServerKeys, find_keys
from gt.wire.sockets import open_socket, receive, receive_from, send

MAX_UNTAKEN = 1 << 16  # messages that a server keeps for a peer that does not take them, and of one that sends
_OPENING_SECONDS = 5.0
_UNKNOWN_SHARE = 4  # the part of all connections that peers may have which were not admitted
_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Link:
    """A client's or worker's connection to a dispatcher. `keys` are needed where that is reached by TCP."""

    def __init__(self, endpoint: str, keys: MemberKeys | None, milliseconds: int, silence: float) -> None:
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, milliseconds, silence)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _ENDS)
        self._lost = False
        self._endpoint = endpoint
        self._socket.connect(endpoint)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def is_opened(self) -> bool:
        """Waits until the other end has accepted this one; False if it did not. Raises SettingsError where the other
        end is the server of the keys, but does not accept them."""
        deadline = time.monotonic() + _OPENING_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if self._monitor.poll(int(left * 1000) + 1):
                event = recv_monitor_message(self._monitor)["event"]
                self._lost = event != zmq.EVENT_HANDSHAKE_SUCCEEDED
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise SettingsError(
                        f"the server at {self._endpoint} refuses the keys that are kept for it; start the server "
                        f"again, or set GT_KEYS to the directory that it writes its keys to"
                    )
                return not self._lost
        return False

    def is_lost(self) -> bool:
        while not self._lost and self._monitor.poll(0):
            self._lost = bool(recv_monitor_message(self._monitor)["event"] & _ENDS)
        return self._lost

    def send(self, frames: Sequence[Frame]) -> None:
        """Raises ConnectionLost where there is no connection any more."""
        try:
            send(self._socket, frames)
        except zmq.Again:
            self._lost = True
            raise ConnectionLost("the connection was lost") from None

    def receive(self, *, waits: bool = True) -> list[bytes] | None:
        return receive(self._socket, waits=waits)

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()


def open_link(endpoint: str, directory: Path, milliseconds: int, silence: float) -> Link | None:
    """None where no dispatcher of this user answers now."""
    keys = find_keys(directory, endpoint)
    if keys is None and not endpoint.startswith("ipc:"):
        return None
    link = Link(endpoint, keys, milliseconds, silence)
    try:
        if link.is_opened():
            return link
    except BaseException:
        link.close()
        raise
    link.close()
    return None


class Router:
    """A dispatcher's end of all connections. A peer is named by its connection; the name is never used again. Of
    connections that were not admitted the oldest are closed where there are many, so that they do not take all
    descriptors."""

    def __init__(self, endpoint: str, keys: ServerKeys | None, milliseconds: int, silence: float) -> None:
        raise_limit()
        self._most_unknown = limit() // _UNKNOWN_SHARE
        self._context = zmq.Context()
        self._gatekeeper = Authenticator(self._context, keys.member) if keys is not None else None
        self._socket = open_socket(self._context, zmq.ROUTER, milliseconds, silence)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNTAKEN)
        self._socket.setsockopt(zmq.RCVHWM, MAX_UNTAKEN)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"gt")
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody is let in without the gatekeeper
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        self._names: dict[int, bytes] = {}  # of peers, by the descriptor of their connection
        self._peers: dict[bytes, int] = {}
        self._unknown: dict[int, None] = {}  # descriptors of connections that were not admitted, the oldest first
        self._lost: list[bytes] = []

    def receive(self, *, waits: bool = True) -> tuple[bytes, list[bytes]] | None:
        """A message and the name of the peer that sent it."""
        message = receive_from(self._socket, self._peers, waits=waits)
        if message is None:
            return None
        frames, descriptor = message
        name = frames.pop(0)
        if name not in self._peers:
            self._notice_losses()  # first: the descriptor may have been that of another connection
            self._peers[name] = descriptor
            self._names[descriptor] = name
        return name, frames

    def send(self, name: bytes, frames: Sequence[Frame]) -> None:
        """Nothing is sent to a peer that is gone; one that does not take what it is sent is given up."""
        try:
            send(self._socket, [name, *frames])
        except zmq.Again:
            self._lost.append(name)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def admit(self, name: bytes) -> None:
        """A peer is one of those that this router is for."""
        self._unknown.pop(self._peers.get(name, -1), None)

    def drop(self, name: bytes) -> None:
        """Close the connection of a peer, and forget what it was not yet sent. It is lost then like any other."""
        self._notice_losses()
        descriptor = self._peers.get(name)
        if descriptor is None:
            self._lost.append(name)
        else:
            shut(descriptor)

    def take_lost(self) -> list[bytes]:
        """The names of peers whose connections were lost since the last time."""
        self._notice_losses()
        lost, self._lost = self._lost, []
        return lost

    def _notice_losses(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                descriptor = int(event["value"])
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._unknown[descriptor] = None
                    continue
                self._unknown.pop(descriptor, None)
                name = self._names.pop(descriptor, None)
                if name is not None:
                    del self._peers[name]
                    self._lost.append(name)
        while len(self._unknown) > self._most_unknown:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            shut(oldest)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()
