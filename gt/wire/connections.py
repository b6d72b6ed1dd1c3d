"""Connections between a dispatcher and its peers; both ends detect a lost connection.

A lost connection is never reopened, because an unknown number of messages is lost with it. A worker that connects again
is a new peer. A client sends over its next connection what was lost with the last one (`message_stream.py`).
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from gt.core.errors import ConnectionLost, SettingsError
from gt.wire.addresses import NotResolved, resolve
from gt.wire.authentication import Authenticator
from gt.wire.file_descriptors import (
    open_files_limit,
    peer_address,
    peer_process,
    raise_open_files_limit,
    seconds_of_silence,
    shut_down,
)
from gt.wire.held_frames import HeldFrames
from gt.wire.refusals import Refusals
from gt.wire.server_keys import MemberKeys, ServerKeys, find_keys
from gt.wire.sockets import Sender, SentFrame, has_message, open_socket, receive, receive_from, send
from gt.wire.tcp_watch import TcpWatch, WireBytes, memory_of_machine

MAX_QUEUED = 1 << 16  # messages that a server queues for each peer, and from each peer
_SILENT_SHARE = 0.9
_HANDSHAKE_SECONDS = 5.0
_CANCELLED_MS = 100  # the end of a cancelled handshake is noticed within this time
_REMEMBERED = 1 << 12  # connections that have ended
_UNKNOWN_SHARE = 8  # a connection takes two files; a quarter of all files may belong to peers that were not admitted
_WAITING_SHARE = 2  # half of the machine's memory may be bytes of peers in ZeroMQ's queues
_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_LOSSES = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | _FAILED_HANDSHAKES
_NAME_BYTES = 5  # length of ZeroMQ's names for connections, which begin with 0
_FULL = "it may have as many connections as it takes, or as its limit on open files (ulimit -n) allows"
_OTHER_KEY = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)


def is_silent(descriptor: int, limit: float) -> bool:
    """Whether no bytes have come over a TCP connection for so long that the limit will have passed when both ends have
    noticed (0: no limit). Both ends send heartbeats four times within it."""
    return limit > 0 and (seconds_of_silence(descriptor) or 0.0) > _SILENT_SHARE * limit


class NoConnection(Exception):
    """No connection could be opened, for a reason that may pass."""


class Link:
    """The connection of a client or worker to a dispatcher, with `keys` if it goes over TCP. `receive` waits for
    `milliseconds`, or until the descriptor `interrupt` is readable."""

    def __init__(
        self, endpoint: str, keys: MemberKeys | None, milliseconds: int, silence: float, interrupt: int | None = None
    ) -> None:
        self._milliseconds = milliseconds
        self._interrupt = interrupt
        self._context = zmq.Context()
        self._silence = silence
        self._connection = -1  # its descriptor
        self._socket = open_socket(self._context, zmq.DEALER, milliseconds, silence, is_tcp=endpoint.startswith("tcp:"))
        self._is_encrypted = keys is not None
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED | _LOSSES)
        self._lost = False
        self._has_connected = False
        self._endpoint = endpoint
        self._socket.connect(endpoint)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        self._events = select.poll()
        for descriptor in (self.descriptor, interrupt):
            if descriptor is not None:
                self._events.register(descriptor, select.POLLIN)

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def is_opened(self, cancelled: threading.Event) -> bool:
        """Wait for the end of the handshake, or for the event; returns whether the connection is open. Raises
        SettingsError if the server refuses the keys, and NoConnection if something answers that does not shake
        hands."""
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not cancelled.is_set():
            if self._monitor.poll(min(int(left * 1000) + 1, _CANCELLED_MS)):
                message = recv_monitor_message(self._monitor)
                event = message["event"]
                if event == zmq.EVENT_CONNECTED:
                    self._has_connected = True
                    self._connection = int(message["value"])
                    continue
                self._lost = event != zmq.EVENT_HANDSHAKE_SUCCEEDED
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise SettingsError(
                        f"the server at {self._endpoint} refuses the keys that are kept for it; start the server "
                        f"again, or set GT_KEYS to the directory that it writes its keys to; on another machine, make "
                        f"a client key that it admits: python -m gt.keys client NAME"
                    )
                if event & _FAILED_HANDSHAKES and self._has_connected:
                    hint = "client.key may be for another server, or this one does not encrypt"
                    if not self._is_encrypted:
                        hint = "it may require keys: leave out --insecure and GT_INSECURE"
                    raise NoConnection(f"something answers at {self._endpoint}, but refuses the handshake: {hint}")
                if self._lost and self._has_connected:
                    raise NoConnection(f"the server at {self._endpoint} has closed the connection at once: {_FULL}")
                return not self._lost
        if self._has_connected and not cancelled.is_set():
            raise NoConnection(
                f"something listens at {self._endpoint}, but does not shake hands: it is stopped or busy, or {_FULL}"
            )
        return False

    def is_lost(self) -> bool:
        while not self._lost and self._monitor.poll(0):
            self._lost = bool(recv_monitor_message(self._monitor)["event"] & _LOSSES)
        if not self._lost and is_silent(self._connection, self._silence):
            shut_down(self._connection)
            self._lost = True
        return self._lost

    def send(self, frames: Sequence[SentFrame]) -> None:
        """Raises ConnectionLost if the connection is lost."""
        try:
            send(self._socket, frames)
        except zmq.Again:
            self._lost = True
            raise ConnectionLost("the connection was lost") from None

    def receive(self, *, waits: bool = True) -> list[bytes] | None:
        """A message, or None if none arrives in time."""
        if waits and not has_message(self._socket):
            self._wait()
        return receive(self._socket, waits=False)

    def _wait(self) -> None:
        """Wait for a message. Not inside ZeroMQ, which waits on after a signal. The socket's descriptor becomes
        readable for other reasons too."""
        deadline = time.monotonic() + self._milliseconds / 1000
        while (left := deadline - time.monotonic()) > 0:
            happened = self._events.poll(left * 1000)
            if any(descriptor == self._interrupt for descriptor, _ in happened) or has_message(self._socket):
                return

    def has_message(self) -> bool:
        return has_message(self._socket)

    def close(self, linger: int | None = None) -> None:
        """Messages that were not sent yet are sent for `linger` milliseconds (None: as all sockets do)."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger)
        self._context.term()


def open_link(
    endpoint: str,
    directory: Path | None,
    milliseconds: int,
    silence: float,
    interrupt: int | None = None,
    cancelled: threading.Event | None = None,
) -> Link | None:
    """A connection to the dispatcher at an endpoint; None if no dispatcher answers there, or this user has no keys for
    it, or `cancelled` is set meanwhile. `directory` is that of the keys (None: without encryption). Raises NoConnection
    where the reason is known, and SettingsError where waiting does not help. See Link."""
    keys = None
    if endpoint.startswith("tcp:"):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        try:
            endpoint = f"tcp://{resolve(host)}:{port}"
        except NotResolved as error:
            raise NoConnection(str(error)) from None
        keys = find_keys(directory, endpoint) if directory is not None else None
        if keys is None and directory is not None:
            return None
    link = Link(endpoint, keys, milliseconds, silence, interrupt)
    try:
        if link.is_opened(cancelled or threading.Event()):
            return link
    except BaseException:
        link.close()
        raise
    link.close()
    return None


class _ConnectionEvent(NamedTuple):
    """An event of a connection: `value` is its descriptor or, if its handshake has failed, the reason. `address` is
    that of the other end of a new connection. `is_refused`: ZeroMQ ended the connection because of its bytes."""

    kind: int
    value: int
    address: str = ""
    is_refused: bool = False


class Router:
    """A dispatcher's end of all connections. A peer is named by its connection, and the name is never used again.
    Where too many connections were not admitted, the oldest are closed, so that they do not use up all descriptors.
    Where more than `max_waiting` bytes wait in ZeroMQ's queues, the peer with the most of them is disconnected.
    `endpoint` has the port that the system chose if 0 was asked for. Without `keys` nothing is encrypted."""

    def __init__(
        self,
        endpoint: str,
        keys: ServerKeys | None,
        milliseconds: int,
        silence: float,
        refusals: Refusals | None = None,
        max_waiting: int = 0,
    ) -> None:
        raise_open_files_limit()
        self.refusals = refusals or Refusals()
        self._max_unknown = open_files_limit() // _UNKNOWN_SHARE
        self._context = zmq.Context()
        self._silence = silence
        self._socket = open_socket(self._context, zmq.ROUTER, milliseconds, silence, is_tcp=endpoint.startswith("tcp:"))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"gt")
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # refuses all peers if the authenticator has ended
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | _FAILED_HANDSHAKES
        )
        self._monitoring = threading.Lock()  # the authenticator's thread reads the monitor too
        self._watch = TcpWatch()
        self._wire_bytes = WireBytes(is_encrypted=keys is not None)
        self._max_waiting = max_waiting or memory_of_machine() // _WAITING_SHARE
        self._events: deque[_ConnectionEvent] = deque()
        self._authenticator: Authenticator | None = None
        if keys is not None:
            watched = int(self._monitor.getsockopt(zmq.FD))
            self._authenticator = Authenticator(self._context, keys, self.refusals, watched, self._read_events)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        self._names: dict[int, bytes] = {}  # names of peers, by the descriptor of their connection
        self._peers: dict[bytes, int] = {}
        self._unknown: dict[int, None] = {}  # descriptors of connections that were not admitted, the oldest first
        self._addresses: dict[int, str] = {}  # addresses of the other ends, by descriptor
        self._keys_of: dict[bytes, str] = {}  # the names of the keys of peers
        self._ended: dict[bytes, None] = {}  # names of peers, of which messages may still be read
        self._problem: str | None = None  # why the last handshake failed
        self._held: dict[bytes, HeldFrames] = {}
        self._lost: list[bytes] = []
        self._dropped: set[bytes] = set()  # peers whose connections were closed for their bytes, and have not ended yet

    def receive(self, *, waits: bool = True) -> tuple[bytes, list[bytes]] | None:
        """A message, with the name of the peer that sent it."""
        message = receive_from(self._socket, self._peers, waits=waits)
        if message is None:
            return None
        frames, sender = message
        name = frames.pop(0)
        if sender is not None:
            if len(name) != _NAME_BYTES or name[0]:
                self._refuse_name(sender.descriptor)
                return None
            self._note_peer(name, sender)
        if not frames:
            self.refusals.note(
                "limit", name.hex(), f"{self.address_of(name) or 'a connection'}: no memory for a message"
            )
            self.drop(name)  # a message is lost, and so are those after it
            return None
        if name in self._peers:
            self._wire_bytes.note_received(name, frames)
        return name, frames

    def _refuse_name(self, descriptor: int) -> None:
        """A peer has chosen its own name, which may have been that of another."""
        self._read_events()
        peer = peer_address(descriptor) or "a connection"
        self.refusals.note("name", peer, f"{peer}: it has given its connection a name")
        shut_down(descriptor)

    def _note_peer(self, name: bytes, sender: Sender) -> None:
        """The first message of a peer, or a late one. Its connection may have ended, and another one may have its
        descriptor: then that one is closed too, since the end of a descriptor is the end of one peer."""
        self._notice_losses()
        if name in self._ended:
            return
        descriptor = sender.descriptor
        if descriptor not in self._addresses or descriptor in self._names:
            if descriptor in self._names:
                shut_down(descriptor)
            self._lost.append(name)
            self._note_ended(name)
            return
        self._peers[name] = descriptor
        self._names[descriptor] = name
        self._keys_of[name] = sender.key

    def has_message(self) -> bool:
        return has_message(self._socket)

    def send(self, name: bytes, frames: Sequence[SentFrame]) -> None:
        """Send a message. A lost peer gets nothing, and the connection of a peer whose queue is full is closed."""
        try:
            send(self._socket, [name, *frames])
            self._wire_bytes.note_sent(name, frames)
        except zmq.Again:
            self.drop(name)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def hold(self, name: bytes, frames: Sequence[SentFrame]) -> None:
        """Keep frames until the peer asks for them."""
        if name in self._peers:
            self._held.setdefault(name, HeldFrames()).add(frames)

    def send_held(self, name: bytes, start: int, stop: int) -> None:
        """Send a peer some of its frames, and drop those before them. Raises ProtocolError for frames that are not
        held."""
        message = self._held.setdefault(name, HeldFrames()).take(start, stop)
        if message:
            self.send(name, message)

    def admit(self, name: bytes) -> None:
        """The peer has shaken hands: its connection does not count as unknown any more."""
        self._unknown.pop(self._peers.get(name, -1), None)

    def drop(self, name: bytes) -> None:
        """Close the connection of a peer and drop the messages in its queue. `take_lost` then returns its name."""
        self._notice_losses()
        descriptor = self._peers.get(name)
        if descriptor is not None:
            shut_down(descriptor)
        elif name not in self._lost:
            self._lost.append(name)

    def take_lost(self) -> list[bytes]:
        """The names of peers whose connections were lost since the last call."""
        self._notice_losses()
        for descriptor in self._peers.values():
            if is_silent(descriptor, self._silence):
                shut_down(descriptor)  # noticed as any other loss is
        self._limit_waiting()
        lost, self._lost = self._lost, []
        return lost

    def _limit_waiting(self) -> None:
        """Close the connection with the most bytes in ZeroMQ's queues, if all of them are too many: bytes that have
        arrived and are no whole message yet, or have not been read, and bytes that the peer does not take."""
        with self._monitoring:
            carried = [(self._watch.carried(descriptor), name) for descriptor, name in self._names.items()]
        carried = [(each, name) for each, name in carried if name not in self._dropped]
        waiting = [
            (self._wire_bytes.waiting(name, each) + (self._held[name].nbytes if name in self._held else 0), name)
            for each, name in carried
            if each is not None
        ]
        if sum([nbytes for nbytes, _ in waiting]) > self._max_waiting:
            nbytes, name = max(waiting)
            peer = self.address_of(name) or "a connection"
            text = f"{peer}: {nbytes} bytes from it and for it wait, and all queues may hold {self._max_waiting}"
            self.refusals.note("limit", peer, text)
            self._dropped.add(name)
            self.drop(name)

    def address_of(self, name: bytes) -> str:
        """The address of a peer, for people; "" if it is not known."""
        return self._addresses.get(self._peers.get(name, -1), "")

    def process_of(self, name: bytes) -> int:
        """The pid of a peer that is proven; 0 without a proof."""
        return peer_process(self._peers.get(name, -1))

    def silence_of(self, name: bytes) -> float | None:
        """The seconds since bytes came from a peer, answers to heartbeats among them; None if that is not
        known."""
        return seconds_of_silence(self._peers.get(name, -1))

    def key_of(self, name: bytes) -> str:
        """The name of the key of a peer; "" without encryption."""
        return self._keys_of.get(name, "")

    def _read_events(self) -> None:
        """Take the events of connections, and the addresses of new ones before they can be closed."""
        with self._monitoring, contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                kind, value = int(event["event"]), int(event["value"])
                if kind == zmq.EVENT_ACCEPTED:
                    self._watch.add(value)
                    self._events.append(_ConnectionEvent(kind, value, peer_address(value)))
                elif kind == zmq.EVENT_DISCONNECTED:
                    self._events.append(_ConnectionEvent(kind, value, is_refused=self._watch.end(value)))
                else:
                    self._events.append(_ConnectionEvent(kind, value))

    def _notice_losses(self) -> None:
        self._read_events()
        while self._events:
            self._note_event(self._events.popleft())
        while len(self._unknown) > self._max_unknown:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            shut_down(oldest)

    def _note_event(self, event: _ConnectionEvent) -> None:
        if event.kind == zmq.EVENT_ACCEPTED:
            self._unknown[event.value] = None
            self._addresses[event.value] = event.address
        elif event.kind & _FAILED_HANDSHAKES:  # the next event is the end of the same connection
            no_peer = "it does not encrypt as this server does, or is no peer of GT"
            self._problem = "it has the key of another server" if event.value == _OTHER_KEY else no_peer
        elif event.kind == zmq.EVENT_DISCONNECTED:
            self._note_end(event)

    def _note_end(self, event: _ConnectionEvent) -> None:
        descriptor = event.value
        peer = self._addresses.pop(descriptor, "") or "a connection"
        problem, self._problem = self._problem, None
        if problem is not None:
            self.refusals.note("handshake", peer, f"{peer}: {problem}")
        elif event.is_refused:
            self.refusals.note("frame", peer, f"{peer}: it sent a frame over the limit, or bytes that are no frame")
        self._unknown.pop(descriptor, None)
        name = self._names.pop(descriptor, None)
        if name is not None:
            del self._peers[name]
            del self._keys_of[name]
            self._wire_bytes.forget(name)
            self._held.pop(name, None)
            self._dropped.discard(name)
            self._lost.append(name)
            self._note_ended(name)

    def _note_ended(self, name: bytes) -> None:
        self._ended[name] = None
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()  # first: its thread reads the monitor
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
        self._watch.close()
