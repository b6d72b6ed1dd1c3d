"""Handshakes: workers join immediately, clients wait until enough workers are ready."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from gt.core import worker_progress
from gt.core.errors import ProtocolError
from gt.core.messages import Hello, Waiting, Welcome, WorkerInfo
from gt.dispatcher.backpressure import Backpressure
from gt.dispatcher.delivery import Deliver, Delivery
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.peers import NO_PROGRESS, Peer, PeerTable
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.addresses import is_ipv4
from gt.wire.file_descriptors import open_files_limit
from gt.wire.process_identity import host_name, start_mark, this_host

log = logging.getLogger("gt.dispatcher")

# Parts of the files that may be open, of which a connection takes two: sessions of a key and of all keys, workers, and
# all of these. The rest is for connections that were not admitted, and for the server itself.
_KEY_SHARE, _ALL_SHARE, _WORKER_SHARE, _PEER_SHARE = 1 / 8, 1 / 4, 1 / 4, 3 / 10


@contextmanager
def internal_errors_logged(what: str) -> Generator[None]:
    """Around the work for one peer: an internal error is logged, and the other peers are served."""
    try:
        yield
    except Exception:
        log.exception("%s could not be dealt with", what)


@dataclass
class _WaitingClient:
    """A client that was not welcomed yet, with the name of its key. `told` is the last reason sent to it."""

    hello: Hello
    key: str
    told: str = ""


class Greeting(NamedTuple):
    """What a server sends to new peers: the path of its instruction log, the text of its configuration of signals and
    the name of that file, and the command by which workers join it. `server` and `lease`: see SessionLeases."""

    log_path: str = ""
    signals: str = ""
    signals_file: str = ""
    worker_command: str = "python -m gt.worker --host localhost -p PORT"
    server: str = ""
    lease: float = 0.0


class Handshakes:
    """Answers the hellos of workers and clients. None is admitted while the server `is_ending`."""

    def __init__(self, dispatcher: Dispatcher, peers: PeerTable, delivery: Delivery, greeting: Greeting) -> None:
        self._dispatcher = dispatcher
        self._peers = peers
        self._delivery = delivery
        self.greeting = greeting
        self.is_ending = False
        self._waiting: dict[bytes, _WaitingClient] = {}

    def greet(self, identity: bytes, hello: Hello, key: str, process: int) -> None:
        """Answer a hello. `key` is the name of the peer's key, and `process` its pid, if that is proven."""
        if self.is_ending:
            raise ProtocolError("the server is about to end, and admits nobody", "unknown")
        if hello.role == "worker":
            self._require_room_for_worker()
            self._welcome_worker(identity, hello, process)
        elif hello.role == "client":
            self._require_room(key)
            self._waiting[identity] = _WaitingClient(hello, key)
        else:
            raise ProtocolError(f"{hello.role!r} is not a role; clients and workers connect here", "unknown")
        self.welcome_waiting()

    def _require_room(self, key: str) -> None:
        """Refuse a session for which there may be no files: each connection takes two, and workers need some too."""
        keys = [peer.key for peer in self._peers.by_identity.values() if peer.is_client]
        keys += [client.key for client in self._waiting.values()]
        files, workers = open_files_limit(), len(self._peers.workers)
        most, of_key = max(int(files * _ALL_SHARE), 1), max(int(files * _KEY_SHARE), 1)
        if len(keys) >= most or keys.count(key) >= of_key or len(keys) + workers >= max(files * _PEER_SHARE, 2):
            raise ProtocolError(
                f"the server has {len(keys)} sessions, {keys.count(key)} of this key, and {workers} workers; with "
                f"{files} files that it may open it takes {most}, {of_key} of a key, and {int(files * _PEER_SHARE)} of "
                f"sessions and workers. End some of them, or raise its limit: ulimit -n",
                "limit",
            )

    def _require_room_for_worker(self) -> None:
        """Refuse a worker for which there may be no files."""
        files, workers = open_files_limit(), len(self._peers.workers)
        peers = len(self._peers.by_identity) + len(self._waiting)
        if workers >= max(int(files * _WORKER_SHARE), 1) or peers >= max(files * _PEER_SHARE, 2):
            raise ProtocolError(
                f"the server has {workers} workers and {peers - workers} sessions; with {files} files that it may open "
                f"it takes {int(files * _WORKER_SHARE)} workers, and {int(files * _PEER_SHARE)} of both. Raise its "
                f"limit: ulimit -n",
                "limit",
            )

    def is_waiting(self, identity: bytes) -> bool:
        """Whether a client has said hello over this connection, and waits for workers."""
        return identity in self._waiting

    def forget(self, identity: bytes) -> None:
        self._waiting.pop(identity, None)

    def _welcome_worker(self, identity: bytes, hello: Hello, process: int) -> None:
        if hello.progress:
            shared_memory.require_name(hello.progress)
        shares = hello.progress and hello.host == this_host()
        if shares and not hello.progress.startswith(f"gt-{hello.pid}-"):
            raise ProtocolError(f"shared buffer {hello.progress} is not one of process {hello.pid}", "foreign")
        progress = shared_memory.take(hello.progress, worker_progress.NBYTES).cast("q") if shares else NO_PROGRESS
        if not is_ipv4(hello.address):
            raise ProtocolError(f"{hello.address!r} is not an address at which other workers reach a worker")
        start_time = start_mark(hello.pid)  # before the worker joins: this fails if too many files are open
        ident, outgoing = self._dispatcher.join_worker(
            hello.device,
            hello.host,
            hello.pid,
            hello.memory,
            overlaps=hello.overlaps,
            hostname=hello.hostname,
            address=hello.address,
        )
        peer = Peer(hello, ident, start_time, progress=progress, proven_pid=process)  # type: ignore[arg-type]
        self._peers.add(identity, peer)
        self._delivery.send_to(identity, [Welcome(__version__, ident, os.getpid(), this_host())])
        log.info("worker %d joined (%s, pid %d on %s)", ident, hello.device, hello.pid, hello.hostname or host_name())
        self._delivery.send(outgoing)

    def open_local_session(self, deliver: Deliver) -> Welcome:
        """Open a session for this process. Its answers are passed to `deliver`."""
        ident = self._dispatcher.open_session(this_host(), os.getpid())
        self._delivery.local_sessions[ident] = deliver
        return Welcome(__version__, ident, os.getpid(), this_host(), self._dispatcher.ready_workers())

    def welcome_waiting(self) -> None:
        """Welcome the clients for which enough workers are ready now."""
        if not self._waiting:
            return
        ready = self._dispatcher.ready_workers()
        for identity, client in list(self._waiting.items()):
            with internal_errors_logged("the welcome of a client"):
                if len(ready) >= client.hello.wants_workers:
                    del self._waiting[identity]
                    self._welcome_client(identity, client, ready)
                else:
                    self._explain_wait(identity, client, len(ready))

    def _welcome_client(self, identity: bytes, client: _WaitingClient, ready: tuple[WorkerInfo, ...]) -> None:
        hello = client.hello
        start_time = start_mark(hello.pid)
        ident = self._dispatcher.open_session(hello.host, hello.pid, client.key)
        session_secret = secrets.token_hex(16)
        limit = self._dispatcher.limits.instructions
        peer = Peer(hello, ident, start_time, session_secret=session_secret, key=client.key)
        peer.backpressure = Backpressure(limit)
        self._peers.add(identity, peer)
        greeting = self.greeting
        welcome = Welcome(
            __version__,
            ident,
            os.getpid(),
            this_host(),
            ready,
            session_secret,
            greeting.log_path,
            greeting.signals,
            greeting.signals_file,
            limit or 0,
            greeting.server,
            greeting.lease,
        )
        self._delivery.send_to(identity, [welcome])
        log.info("client %d joined (pid %d on %s)", ident, hello.pid, hello.hostname or host_name())

    def _explain_wait(self, identity: bytes, client: _WaitingClient, ready: int) -> None:
        reason = (
            f"{ready} of {client.hello.wants_workers} workers have joined the server; "
            f"start more with: {self.greeting.worker_command}"
        )
        if reason != client.told:
            client.told = reason
            self._delivery.send_to(identity, [Waiting(reason)])
