"""The clients and workers that are connected to the server."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gt.core.messages import Hello
from gt.core.worker_progress import LENGTH
from gt.dispatcher.backpressure import Backpressure
from gt.wire.message_stream import MessageStream, SendWindow
from gt.wire.process_identity import this_host

_REMEMBERED = 1 << 10  # connections that clients have replaced
NO_PROGRESS = (0,) * LENGTH  # a client's, or that of a worker of another machine before its first report


@dataclass
class Peer:
    """A client or worker after its hello. `ident` is a session or a worker's id, and `start_time` identifies its
    process. `progress` shows what a worker does, as in `core/worker_progress.py`. `session_secret` is that of Welcome.
    The connection of a peer that is `lost` has ended. `key` is the name of its key, and `joined_at` the time of its
    hello. `proven_pid` is what the kernel says of its connection (0: nothing), where `hello` has what the peer says.
    `stream` has the messages of a client, whose session is kept after a loss until the time `kept_until`."""

    hello: Hello
    ident: int
    start_time: str
    malformed_messages: int = 0
    progress: Sequence[int] = NO_PROGRESS
    session_secret: str = ""
    backpressure: Backpressure = field(default_factory=Backpressure)
    lost: bool = False
    key: str = ""
    proven_pid: int = 0
    joined_at: float = field(default_factory=time.monotonic)
    silence: float = 0.0  # seconds since the last bytes came from a worker of another machine, at the latest check
    stream: MessageStream = field(default_factory=lambda: MessageStream(SendWindow()))
    kept_until: float = math.inf

    @property
    def is_client(self) -> bool:
        return self.hello.role == "client"

    @property
    def is_of_this_machine(self) -> bool:
        return self.hello.host == this_host()

    @property
    def process(self) -> str:
        """The process of the peer, for people; of another machine, with the name of that."""
        return f"pid {self.hello.pid}" + (
            "" if self.is_of_this_machine else f" on {self.hello.hostname or 'elsewhere'}"
        )


class PeerTable:
    """Peers by the identities that the router gives connections; identities of `clients` by session, and of `workers`
    by worker id. The clients in `held` have instructions that wait for their backpressure or their turn. Messages of
    `replaced` connections, which clients do not use any more, are ignored."""

    def __init__(self) -> None:
        self.by_identity: dict[bytes, Peer] = {}
        self.clients: dict[int, bytes] = {}
        self.workers: dict[int, bytes] = {}
        self.held: dict[int, Peer] = {}
        self.replaced: dict[bytes, None] = {}

    def add(self, identity: bytes, peer: Peer) -> None:
        self.by_identity[identity] = peer
        (self.clients if peer.is_client else self.workers)[peer.ident] = identity

    def move(self, peer: Peer, identity: bytes) -> None:
        """A client has a new connection."""
        former = self.clients[peer.ident]
        del self.by_identity[former]
        self.add(identity, peer)
        self.replaced[former] = None
        while len(self.replaced) > _REMEMBERED:
            del self.replaced[next(iter(self.replaced))]

    def remove(self, peer: Peer) -> None:
        identity = (self.clients if peer.is_client else self.workers).pop(peer.ident, None)
        if identity is not None:
            del self.by_identity[identity]
        if peer.is_client:
            self.held.pop(peer.ident, None)

    def connected_clients(self) -> list[Peer]:
        return [peer for peer in self.by_identity.values() if peer.is_client and not peer.lost]

    def client(self, session: int) -> Peer | None:
        """None for a session of this process."""
        identity = self.clients.get(session)
        return self.by_identity[identity] if identity is not None else None
