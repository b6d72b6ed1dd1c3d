"""Exchanges between worker processes, by torch.distributed process groups.

There is one group for each set of workers that exchanges anything, made when it is first needed. The dispatcher orders
all exchanges, so every member of one comes to it after the same exchanges.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from gt.core.messages import Failure
from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.group_backends import GlooGroup, GroupBackend, NcclGroup, can_use_nccl
from gt.worker.exchange.in_flight import InFlightSends
from gt.worker.exchange.interface import LookAhead, ReceivedValues, Swap
from gt.worker.exchange.rendezvous import CONNECT_TIMEOUT, LOOPBACK, MEMBER_TIMEOUT, Rendezvous
from gt.worker.exchange.torch_private import make_gloo_group, make_nccl_group
from gt.worker.failed_value import FailedValue

_HEADER_BYTES = 8
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Failure)


class _Receive(NamedTuple):
    """A receive that was begun, and the memory it fills."""

    work: Any
    buffer: torch.Tensor


class GroupExchange:
    """The process groups of one worker, the tensors in flight, and at most one swap whose receives began early."""

    def __init__(self, worker: int, device: str, look_ahead: LookAhead = lambda: None) -> None:
        self.rendezvous = Rendezvous(worker, _gpu(torch.device(device)), look_ahead)
        self.groups: dict[tuple[int, ...], GroupBackend] = {}
        self.in_flight = InFlightSends(_wait)
        self._worker = worker
        self._device = torch.device(device)
        self._prefetched: dict[int, _Receive] = {}  # by sender, for the next swap that receives

    def host_store(self) -> int:
        return self.rendezvous.host_store()

    def join_store(self, host: str, port: int, worker: int) -> None:
        self.rendezvous.join_store(host, port, worker)

    def lose_worker(self, worker: int) -> None:
        self.rendezvous.lost.add(worker)

    def leave(self) -> None:
        self.groups.clear()  # the connections of a group end with the last reference to it
        self._prefetched.clear()
        self.in_flight = InFlightSends(_wait)
        self.rendezvous.leave()

    def required_workers(self, swap: Swap) -> tuple[int, ...]:
        """The members, and the worker that hosts the store."""
        return tuple(dict.fromkeys((*swap.members, self.rendezvous.host)))

    # Groups

    def find_group(self, members: tuple[int, ...]) -> GroupBackend:
        """The process group of a set of workers, of which this is one. Ranks follow the order of `members`."""
        found = self.groups.get(members)
        if found is None:
            found = self.groups[members] = self._make_group(members)
        return found

    def _make_group(self, members: tuple[int, ...]) -> GroupBackend:
        """Raises on all members where one could not be connected, so that all of them skip the same exchange."""
        store = self.rendezvous.new_attempt(members)
        self.rendezvous.gather(store, members, "here")
        self.rendezvous.require_running(members)  # a member may have come and ended before the last one came
        try:
            group, problem = self._connect(store, members), ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        for member, told in self.rendezvous.gather(store, members, "connected", problem).items():
            if told:
                raise RuntimeError(f"worker {member} is not connected with the others of workers {members}: {told}")
        return group

    def _connect(self, store: dist.Store, members: tuple[int, ...]) -> GroupBackend:
        rank, size = members.index(self._worker), len(members)
        found = [self.rendezvous.find_member(worker) for worker in members]
        if not can_use_nccl([member.gpu for member in found if member is not None]):
            return GlooGroup(
                self.rendezvous.connect_running(
                    members, lambda own: make_gloo_group(own, rank, size, LOOPBACK, CONNECT_TIMEOUT)
                )
            )
        torch.cuda.set_device(self._device)
        group = make_nccl_group(store, rank, size, MEMBER_TIMEOUT)
        # All members are here now. A member with nothing to send or to receive does not come to the first exchange.
        group.eager_connect_single_device(self._device)
        return NcclGroup(group, self._device)

    # Exchanges

    def begin(self, swap: Swap, engine: Engine) -> GroupWork:
        """A tensor is one message: eight bytes with the length of a failure (0: none), then the tensor's bytes. A
        failure follows in a message of its own."""
        group = self.find_group(swap.members)
        work = GroupWork(self.in_flight, group, swap, engine)
        if swap.receives:
            work.receives, self._prefetched = self._prefetched, {}
        self.in_flight.reserve(sum(meta.nbytes for meta, _ in swap.sends.values()))
        work.launch()
        return work

    @property
    def can_prefetch(self) -> bool:
        """Not with NCCL, which matches sends and receives by their order; and one swap at a time, because the message
        of a failure must not be taken for that of a later swap."""
        return not self._prefetched and self._device.type != "cuda"

    def prefetch(self, swap: Swap) -> None:
        group = self.groups.get(swap.members)
        if group is None or not self.can_prefetch:
            return
        for peer, meta in swap.receives.items():
            with _collecting([]):  # a peer that has ended is noticed when its tensor is needed
                self._prefetched[peer] = _receive(group, swap.members.index(peer), _HEADER_BYTES + meta.nbytes)


class GroupWork:
    """A swap over a process group. It waits for the values that it receives, and not for those that it sends. Where one
    peer has ended, the values of the others are exchanged all the same, so that these stay in step."""

    def __init__(self, in_flight: InFlightSends, group: GroupBackend, swap: Swap, engine: Engine) -> None:
        self.receives: dict[int, _Receive] = {}
        self._in_flight = in_flight
        self._group = group
        self._swap = swap
        self._engine = engine
        self._ranks = {member: rank for rank, member in enumerate(swap.members)}
        self._errors: list[Exception] = []

    def launch(self) -> None:
        with self._group.coalesced():
            for peer, (meta, value) in self._swap.sends.items():
                with _collecting(self._errors):
                    self._in_flight.add(peer, *_send(self._group, self._ranks[peer], meta, value, self._engine))
            for peer, meta in self._swap.receives.items():
                with _collecting(self._errors):
                    if peer not in self.receives:
                        self.receives[peer] = _receive(self._group, self._ranks[peer], _HEADER_BYTES + meta.nbytes)

    def finish(self) -> ReceivedValues:
        received: ReceivedValues = {}
        for peer, (work, buffer) in self.receives.items():
            with _collecting(self._errors):
                _wait(work)
                meta = self._swap.receives[peer]
                received[peer] = _unpack(self._group, self._ranks[peer], buffer, meta, self._engine)
                self._in_flight.confirm(peer, except_last=int(peer in self._swap.sends))
        if self._errors:
            raise self._errors[0]
        return received


def _send(
    group: GroupBackend, rank: int, meta: TensorMeta, value: Value | FailedValue, engine: Engine
) -> tuple[list[Any], list[torch.Tensor]]:
    """Returns the buffers too: they must live until they are sent."""
    if not isinstance(value, FailedValue):
        data = torch.as_tensor(engine.bytes_of(value))
        buffers = [torch.cat([_header(group, 0), data.to(group.device)])]
    else:
        failure = _encoder.encode(value.failure)
        expected = torch.zeros(meta.nbytes, dtype=torch.uint8, device=group.device)
        buffers = [
            torch.cat([_header(group, len(failure)), expected]),
            torch.frombuffer(bytearray(failure), dtype=torch.uint8).to(group.device),
        ]
    return [group.send(buffer, rank) for buffer in buffers], buffers


def _receive(group: GroupBackend, rank: int, nbytes: int) -> _Receive:
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=group.device)
    return _Receive(group.receive(buffer, rank), buffer)


def _unpack(
    group: GroupBackend, rank: int, buffer: torch.Tensor, meta: TensorMeta, engine: Engine
) -> Value | FailedValue:
    length = int(buffer[:_HEADER_BYTES].cpu().view(torch.int64).item())
    if length:
        with group.coalesced():
            work, failure = _receive(group, rank, length)
        _wait(work)
        return FailedValue(_decoder.decode(failure.cpu().numpy().tobytes()))
    value = engine.empty(meta)
    if meta.nbytes:
        torch.as_tensor(engine.bytes_of(value)).copy_(buffer[_HEADER_BYTES:])
    return value


def _header(group: GroupBackend, length: int) -> torch.Tensor:
    return torch.tensor([length], dtype=torch.int64, device=group.device).view(torch.uint8)


def _wait(work: Any) -> None:
    work.wait(MEMBER_TIMEOUT)


def _gpu(device: torch.device) -> str:
    """The uuid of a GPU, which is the same for all workers that share it, unlike its index; "" for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@contextmanager
def _collecting(errors: list[Exception]) -> Generator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)
