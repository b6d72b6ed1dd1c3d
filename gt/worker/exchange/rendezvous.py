"""How worker processes find each other: a key-value store that one of them hosts.

The store needs no list of all workers, so workers may come and go.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from gt.wire.addresses import LOOPBACK, address_towards, is_loopback
from gt.wire.file_descriptors import shut_down_connections
from gt.wire.process_identity import is_running, start_mark, this_host
from gt.worker.exchange.interface import LookAhead
from gt.worker.exchange.sealed_store import SealedStore, hidden_prefix
from gt.worker.exchange.watched_waits import WatchedWaits

CONNECT_TIMEOUT = timedelta(seconds=60)  # for the store to answer, and for members that have met to be connected
MEMBER_TIMEOUT = timedelta(hours=1)  # for a member: it may have much to compute first, and one that dies is noticed
LONGEST_PAUSE = 0.05  # seconds between two looks at the store
Connection = TypeVar("Connection")
_encoder = msgspec.msgpack.Encoder()


class Member(msgspec.Struct, array_like=True, frozen=True):
    """A worker as the others know it: the process, to notice its end, the uuid of its GPU, or nothing, and the address
    at which it listens."""

    host: str
    pid: int
    mark: str
    gpu: str
    address: str = LOOPBACK

    @property
    def is_here(self) -> bool:
        """Whether the worker sees the same pids and the same memory as this process."""
        return self.host == this_host()

    @property
    def has_ended(self) -> bool:
        return self.is_here and not is_running(self.pid, self.mark)


_decoder = msgspec.msgpack.Decoder(Member)


class Rendezvous:
    """A worker's connection to the store, which `host` hosts; `members` are the workers found in it so far, and `lost`
    those that the dispatcher has given up, whether they were ever in the store or not. Others reach this worker at
    `address`."""

    def __init__(
        self,
        worker: int,
        gpu: str,
        look_ahead: LookAhead,
        address: str = LOOPBACK,
        waits: WatchedWaits | None = None,
    ) -> None:
        self._waits = waits or WatchedWaits()
        self.host = worker
        self.members: dict[int, Member] = {}
        self.lost: set[int] = set()
        self._look_ahead = look_ahead
        self._worker = worker
        self._gpu = gpu
        self._own_address = address
        self._hosted: dist.TCPStore | None = None
        self._store: SealedStore | None = None
        self._token = ""
        self._address = "", 0
        self._attempts: dict[tuple[int, ...], int] = {}
        self._connecting: _ConnectingThread | None = None

    def host_store(self) -> int:
        with socket.socket() as listening:
            listening.bind((self._own_address, 0))
            listening.listen()
            port = int(listening.getsockname()[1])
            self._hosted = dist.TCPStore(
                self._own_address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=CONNECT_TIMEOUT,
                master_listen_fd=listening.detach(),  # given only a port, it listens at all interfaces
            )
        return port

    def join_store(self, host: str, port: int, worker: int, token: str = "") -> None:
        self.host = worker
        self._address = host, port
        self._token = token
        connection = self._call_watched(self._new_connection, self._require_host)
        self._store = SealedStore(connection, token, "workers", self._ask_store)
        self._attempts.clear()
        member = Member(this_host(), os.getpid(), start_mark(os.getpid()), self._gpu, self._own_address)
        self._store.set(f"worker {self._worker}", _encoder.encode(member))

    def _ask_store(self, ask: Callable[[], Any]) -> Any:
        """The store's answer. Raises where its host is lost: the connections of a machine that vanishes stay open."""
        return self._waits.call(ask, self._require_host, partial(shut_down_connections, *self._address))

    def _require_host(self) -> None:
        if self.is_lost(self.host):
            raise RuntimeError(f"worker {self.host}, which hosts the store of process groups, is lost")

    def leave(self) -> None:
        """Tell the workers that wait for this one that it will not come."""
        if self._store is not None:
            with contextlib.suppress(Exception):  # the store may have ended, and its waiting workers with it
                self._store.set(f"left {self._worker}", "")
        self._close_connecting()

    def require_store(self) -> SealedStore:
        assert self._store is not None, "the dispatcher sends the store's address before any exchange"
        return self._store

    def new_attempt(self, members: tuple[int, ...]) -> SealedStore:
        """An empty part of the store: keys that a failed attempt to connect has left would confuse the next one."""
        attempt = self._attempts[members] = self._attempts.get(members, 0) + 1
        return self.require_store().part(f"{members} {attempt}")

    def listening_address(self, members: Sequence[int]) -> str:
        """The address at which this worker listens for the members of a group, once all have come: its own or, if it
        knows only that of its loopback interface, the one that reaches a member elsewhere."""
        if not is_loopback(self._own_address):
            return self._own_address
        found = [self.find_member(worker) for worker in members]
        outside = [member.address for member in found if member is not None and not is_loopback(member.address)]
        return address_towards(outside[0]) if outside else self._own_address

    def gather(self, store: SealedStore, members: Sequence[int], stage: str, message: str = "") -> dict[int, str]:
        """Wait until all members have reached a stage; returns the message of each. Raises where a member is lost."""
        store.set(f"{stage} {self._worker}", message)
        keys = [f"{stage} {member}" for member in members]
        pause, end = 0.001, time.monotonic() + MEMBER_TIMEOUT.total_seconds()
        while not store.check(keys):
            self.require_running(members)
            if time.monotonic() > end:
                raise TimeoutError(
                    f"not all of workers {tuple(members)} have come to an exchange within {MEMBER_TIMEOUT}"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return {member: store.get(key).decode() for member, key in zip(members, keys, strict=True)}

    def require_running(self, members: Sequence[int]) -> None:
        """Raise if a member is lost, has ended or has left. A member that died before it joined the store left no trace
        there: only the dispatcher knows of it."""
        assert self._store is not None
        self._look_ahead()
        for worker in members:
            if worker in self.lost:
                raise RuntimeError(f"worker {worker} is lost; workers {tuple(members)} cannot meet")
            member = self.find_member(worker)
            if member is None:
                continue
            if member.has_ended or self._store.check([f"left {worker}"]):
                raise RuntimeError(
                    f"worker {worker} (pid {member.pid}) has ended or left; workers {tuple(members)} cannot meet"
                )

    def is_lost(self, worker: int) -> bool:
        """Whether a worker that has been met is lost or has ended. Does not need the store, whose host may have
        ended."""
        self._look_ahead()
        member = self.members.get(worker)
        return worker in self.lost or (member is not None and member.has_ended)

    def connect_running(self, members: tuple[int, ...], connect: Callable[[dist.Store], Connection]) -> Connection:
        """Call a function that connects the members, which waits for all of them. Raises where a member is lost
        meanwhile: the call is then left to a thread of its own, which ends after CONNECT_TIMEOUT. It has its own
        connection to the store, which is of no use for others while it waits."""
        return self._call_watched(lambda: connect(self.group_store(members)), lambda: self.require_running(members))

    def _call_watched(self, connect: Callable[[], Connection], check: Callable[[], None]) -> Connection:
        """Call a function that connects in a thread of its own, and leave it there if `check` raises meanwhile."""
        if self._connecting is None:
            self._connecting = _ConnectingThread()
        outcome = self._connecting.call(connect)
        try:
            while not wait((outcome,), LONGEST_PAUSE).done:
                check()
        except BaseException:
            self._close_connecting()
            raise
        return outcome.result()

    def _close_connecting(self) -> None:
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    def group_store(self, members: tuple[int, ...]) -> dist.Store:
        """The part of the store in which torch connects the members; a connection of its own."""
        return dist.PrefixStore(f"{members} {self._attempts[members]}", self._new_connection())

    def _new_connection(self) -> dist.Store:
        host, port = self._address
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
        return dist.PrefixStore(f"{hidden_prefix(self._token)} hosted by {self.host}", store)

    def find_member(self, worker: int) -> Member | None:
        """None for a worker that has not joined the store yet."""
        assert self._store is not None
        if worker not in self.members and self._store.check([f"worker {worker}"]):
            self.members[worker] = _decoder.decode(self._store.get(f"worker {worker}"))
        return self.members.get(worker)


class _ConnectingThread:
    """Calls functions that connect, one after another, until `close`. It begins when a worker joins the store: where
    memory is lacking, `Thread.start` may wait without end for a thread that could not begin."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="exchange-connect", daemon=True).start()

    def call(self, connect: Callable[[], Connection]) -> Future[Connection]:
        outcome: Future[Connection] = Future()
        self._calls.put(partial(_call, outcome, connect))
        return outcome

    def close(self) -> None:
        """End the thread after its present call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it holds a connection


def _call(outcome: Future[Connection], function: Callable[[], Connection]) -> None:
    try:
        outcome.set_result(function())
    except Exception as error:
        outcome.set_exception(error)
