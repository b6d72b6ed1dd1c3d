"""Tensors between worker processes, by torch.distributed process groups.

One group per set of workers, made on demand from the store that one worker hosts. Groups need no global world, so
workers may come and go. The dispatcher orders all exchanges, so every member of one reaches it at the same place
of the order.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec
import torch
import torch.distributed as dist

from gt.core.messages import Failure
from gt.core.meta import TensorMeta
from gt.wire.liveness import is_running, start_mark, this_host
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.in_flight import InFlightSends
from gt.worker.exchange.interface import Received, Swap
from gt.worker.failed_value import FailedValue

LOOPBACK = "127.0.0.1"  # nothing authenticates what workers tell each other
TIMEOUT = timedelta(seconds=60)  # for the store to answer, and for members that have met to be connected
MEMBER_TIMEOUT = timedelta(hours=1)  # for a member: it may have much to compute first, and one that dies is noticed
LONGEST_PAUSE = 0.05  # seconds between two looks at who has come
_Arriving: TypeAlias = tuple[Any, torch.Tensor]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Failure)


class Member(msgspec.Struct, array_like=True, frozen=True):
    """What the others have to know of a worker: whether it still runs, and which GPU it has, if any."""

    host: str
    pid: int
    mark: str
    gpu: str

    @property
    def has_ended(self) -> bool:
        return self.host == this_host() and not is_running(self.pid, self.mark)


_members = msgspec.msgpack.Decoder(Member)


class Gloo:
    """A process group whose bytes go through the memory of the CPU."""

    device = torch.device("cpu")

    def __init__(self, group: Any) -> None:
        self._group = group

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def send(self, buffer: torch.Tensor, rank: int) -> Any:
        return self._group.send([buffer], rank, 0)

    def receive(self, buffer: torch.Tensor, rank: int) -> Any:
        return self._group.recv([buffer], rank, 0)


class Nccl:
    """A process group of GPUs. Sends and receives that belong together are launched together, or they wait for each
    other; before that none has begun, so what is waited for is the launch."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.device = device
        self._group = group
        self._launch = Launch()

    @contextmanager
    def together(self) -> Generator[None]:
        launch = self._launch = Launch()
        self._group._start_coalescing()
        try:
            yield
        finally:
            launch.work = self._group._end_coalescing()

    def send(self, buffer: torch.Tensor, rank: int) -> Launch:
        self._group.send([buffer], rank, 0)
        return self._launch

    def receive(self, buffer: torch.Tensor, rank: int) -> Launch:
        self._group.recv([buffer], rank, 0)
        return self._launch


class Launch:
    def __init__(self) -> None:
        self.work: Any = None

    def wait(self, patience: timedelta) -> None:
        """The GPU's stream waits, and not this thread, which needs no patience."""
        self.work.wait()


Link: TypeAlias = Gloo | Nccl


def can_use_nccl(gpus: Sequence[str]) -> bool:
    """NCCL connects GPUs, each with one worker."""
    return all(gpus) and len(set(gpus)) == len(gpus)


class GroupExchange:
    def __init__(self, worker: int, device: str) -> None:
        self._worker = worker
        self._device = torch.device(device)
        self._hosted: dist.TCPStore | None = None
        self._store: dist.Store | None = None
        self._store_worker = worker
        self._known: dict[int, Member] = {}
        self._links: dict[tuple[int, ...], Link] = {}
        self._attempts: dict[tuple[int, ...], int] = {}
        self._sent = InFlightSends(_wait)
        self._early: dict[int, _Arriving] = {}  # for the next swap that receives

    def host_store(self) -> int:
        with socket.socket() as listening:
            listening.bind((LOOPBACK, 0))
            listening.listen()
            port = int(listening.getsockname()[1])
            self._hosted = dist.TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=TIMEOUT,
                master_listen_fd=listening.detach(),  # given only a port, it listens at all interfaces
            )
        return port

    def join_store(self, host: str, port: int, worker: int) -> None:
        self._store_worker = worker
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        self._store = dist.PrefixStore(f"hosted by {worker}", store)
        self._attempts.clear()
        member = Member(this_host(), os.getpid(), start_mark(os.getpid()), _gpu(self._device))
        self._store.set(f"worker {self._worker}", _encoder.encode(member))

    def leave(self) -> None:
        """This worker goes on under another id: whoever waits for it under this one is told, and its groups end."""
        self._links.clear()  # with all that refers to the groups: their connections end with the last of it
        self._early.clear()
        self._sent = InFlightSends(_wait)
        if self._store is not None:
            with contextlib.suppress(Exception):  # the store may be gone, and who waited with it
                self._store.set(f"left {self._worker}", "")

    def needs(self, swap: Swap) -> tuple[int, ...]:
        """The members, and the worker whose store they meet at."""
        return tuple(dict.fromkeys((*swap.members, self._store_worker)))

    # Meeting

    def _link(self, members: tuple[int, ...]) -> Link:
        """The process group of a set of workers, of which this is one. Ranks follow the order of `members`."""
        found = self._links.get(members)
        if found is None:
            found = self._links[members] = self._make(members)
        return found

    def _make(self, members: tuple[int, ...]) -> Link:
        """Members agree on whether they are connected: one that is not skips the exchange, and so must the others. What
        a failed attempt leaves in the store would confuse the next, so each has its own part of it."""
        assert self._store is not None, "the dispatcher sends the store's address before any transfer"
        attempt = self._attempts[members] = self._attempts.get(members, 0) + 1
        store = dist.PrefixStore(f"{members} {attempt}", self._store)
        self._meet(store, members, "here")
        try:
            link, problem = self._connect(store, members), ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problems = self._meet(store, members, "connected", problem)
        for member, told in problems.items():
            if told:
                raise RuntimeError(f"worker {member} is not connected with the others of workers {members}: {told}")
        return link

    def _meet(self, store: dist.Store, members: Sequence[int], where: str, word: str = "") -> dict[int, str]:
        """Wait until all members have come here, and give what each of them says."""
        store.set(f"{where} {self._worker}", word)
        places = [f"{where} {member}" for member in members]
        pause, end = 0.001, time.monotonic() + MEMBER_TIMEOUT.total_seconds()
        while not store.check(places):
            self._require_running(members)
            if time.monotonic() > end:
                raise TimeoutError(
                    f"not all of workers {tuple(members)} have come to an exchange within {MEMBER_TIMEOUT}"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return {member: store.get(place).decode() for member, place in zip(members, places, strict=True)}

    def _require_running(self, members: Sequence[int]) -> None:
        assert self._store is not None
        for worker in members:
            member = self._member(worker)
            if member is None:
                continue
            if member.has_ended or self._store.check([f"left {worker}"]):
                raise RuntimeError(
                    f"worker {worker} (pid {member.pid}) has ended or left; workers {tuple(members)} cannot meet"
                )

    def _member(self, worker: int) -> Member | None:
        """None where that worker has not come so far as to join the store."""
        assert self._store is not None
        if worker not in self._known and self._store.check([f"worker {worker}"]):
            self._known[worker] = _members.decode(self._store.get(f"worker {worker}"))
        return self._known.get(worker)

    def _connect(self, store: dist.Store, members: Sequence[int]) -> Link:
        rank, size = members.index(self._worker), len(members)
        found = [self._member(worker) for worker in members]
        if not can_use_nccl([member.gpu for member in found if member is not None]):
            return Gloo(dist.ProcessGroupGloo(store, rank, size, _gloo_options()))
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = MEMBER_TIMEOUT
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        # Now, when all are here: to the first exchange come only those that have something to send or to receive.
        group.eager_connect_single_device(self._device)
        return Nccl(group, self._device)

    # Exchanging

    def swap(self, swap: Swap, engine: Engine) -> Received:
        """One message for each peer: eight bytes with the length of a failure (0: none), then the tensor's bytes. A
        failure follows in a message of its own.

        Waits for what it receives and not for what it sends. Where one peer is gone the others still get and give
        theirs, so that they stay in step; what happened is raised after that.
        """
        link = self._link(swap.members)
        ranks = {member: rank for rank, member in enumerate(swap.members)}
        errors: list[Exception] = []
        arriving: dict[int, _Arriving] = {}
        if swap.receives:
            arriving, self._early = self._early, {}
        self._sent.make_room(sum([meta.nbytes for meta, _ in swap.sends.values()]))
        with link.together():
            for peer, parcel in swap.sends.items():
                with _gathered(errors):
                    self._sent.add(peer, *_send(link, ranks[peer], *parcel, engine))
            for peer, meta in swap.receives.items():
                with _gathered(errors):
                    if peer not in arriving:
                        arriving[peer] = _receive(link, ranks[peer], 8 + meta.nbytes)
        received: Received = {}
        for peer, (work, buffer) in arriving.items():
            with _gathered(errors):
                _wait(work)
                received[peer] = _unpack(link, ranks[peer], buffer, swap.receives[peer], engine)
                self._sent.confirm(peer, but=int(peer in swap.sends))
        if errors:
            raise errors[0]
        return received

    @property
    def is_expecting(self) -> bool:
        """NCCL matches what is sent and received by its order, so there nothing is received before its time."""
        return bool(self._early) or self._device.type == "cuda"

    def expect(self, swap: Swap) -> None:
        """At most one swap is expected: a failure that follows a message must not meet what was asked for later."""
        link = self._links.get(swap.members)
        if link is None or self.is_expecting:
            return
        for peer, meta in swap.receives.items():
            with _gathered([]):  # a peer that is gone is noticed when its tensor is needed
                self._early[peer] = _receive(link, swap.members.index(peer), 8 + meta.nbytes)


def _send(
    link: Link, rank: int, meta: TensorMeta, value: Value | FailedValue, engine: Engine
) -> tuple[list[Any], list[torch.Tensor]]:
    """Gives the buffers too: they must live until they are sent."""
    if not isinstance(value, FailedValue):
        data = torch.as_tensor(engine.bytes_of(value))
        buffers = [torch.cat([_header(link, 0), data.to(link.device)])]
    else:
        told = _encoder.encode(value.failure)
        expected = torch.zeros(meta.nbytes, dtype=torch.uint8, device=link.device)
        buffers = [
            torch.cat([_header(link, len(told)), expected]),
            torch.frombuffer(bytearray(told), dtype=torch.uint8).to(link.device),
        ]
    return [link.send(buffer, rank) for buffer in buffers], buffers


def _receive(link: Link, rank: int, nbytes: int) -> _Arriving:
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=link.device)
    return link.receive(buffer, rank), buffer


def _unpack(link: Link, rank: int, buffer: torch.Tensor, meta: TensorMeta, engine: Engine) -> Value | FailedValue:
    length = int(buffer[:8].cpu().view(torch.int64).item())
    if length:
        with link.together():
            work, told = _receive(link, rank, length)
        _wait(work)
        return FailedValue(_decoder.decode(told.cpu().numpy().tobytes()))
    value = engine.empty(meta)
    if meta.nbytes:
        torch.as_tensor(engine.bytes_of(value)).copy_(buffer[8:])
    return value


def _header(link: Link, length: int) -> torch.Tensor:
    return torch.tensor([length], dtype=torch.int64, device=link.device).view(torch.uint8)


def _wait(work: Any) -> None:
    work.wait(MEMBER_TIMEOUT)


def _gpu(device: torch.device) -> str:
    """The same for two workers that share one, whatever number it has for each of them; empty for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _gloo_options() -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return options


@contextmanager
def _gathered(errors: list[Exception]) -> Generator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)
