"""Exchanges between worker processes: one group for each set of workers that exchanges anything, made when it is first
needed.

The dispatcher orders all exchanges, so every member of one comes to it after the same exchanges.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from gt.core.environment import usable_cpus
from gt.wire.addresses import LOOPBACK, interface_of, is_loopback
from gt.worker.exchange import futex
from gt.worker.exchange.arena import Arena, MemoryFile
from gt.worker.exchange.collective_works import GatherWork, SumWork, wait_for_collective
from gt.worker.exchange.deferred_failure_flags import DeferredFailureFlags
from gt.worker.exchange.distributed_private import make_gloo_group, make_nccl_group
from gt.worker.exchange.failure_store import FailureStore
from gt.worker.exchange.group_backends import (
    CommunicationStream,
    GlooGroup,
    GroupBackend,
    NcclGroup,
    can_use_nccl,
)
from gt.worker.exchange.in_flight_sends import InFlightSends
from gt.worker.exchange.interface import LookAhead, MoveTask, Work
from gt.worker.exchange.local_steps import LocalStep
from gt.worker.exchange.member_status import STATUS_BYTES, GroupPeer, PeerMemory
from gt.worker.exchange.process_groups import ProcessGroup, work_of
from gt.worker.exchange.rendezvous import CONNECT_TIMEOUT, MEMBER_TIMEOUT, Rendezvous
from gt.worker.exchange.sealed_store import SealedStore
from gt.worker.exchange.shared_memory_groups import SharedMemoryGroup
from gt.worker.exchange.watched_waits import WatchedWaits

log = logging.getLogger("gt.worker")
AnyGroup: TypeAlias = SharedMemoryGroup | ProcessGroup
_GOING_ON = (GatherWork, SumWork)  # works that need this worker only to begin and to finish them


def shares_memory(device: str, transport: str) -> bool:
    """Whether a worker shares memory with others of its machine, if the user forces a `transport` or none."""
    return device == "cpu" and transport in ("", "shared") and futex.is_available()


class ProcessExchange:
    """The groups of one worker. `transport` forces one way for all of them: "shared", "gloo" or "nccl"; with "", CPU
    workers of one machine share memory, GPUs use NCCL, and others Gloo. Other workers reach this one at `address`."""

    def __init__(
        self,
        worker: int,
        device: str,
        look_ahead: LookAhead = lambda: None,
        transport: str = "",
        address: str = LOOPBACK,
    ) -> None:
        self._worker = worker
        self._device = torch.device(device)
        self._transport = transport
        self._waits = WatchedWaits()
        self.rendezvous = Rendezvous(worker, _gpu_uuid(self._device), look_ahead, address, self._waits)
        self.groups: dict[tuple[int, ...], AnyGroup] = {}
        self.in_flight = InFlightSends(wait_for_collective)
        self._arena = Arena()
        self._peer_memory: dict[int, PeerMemory] = {}
        self._failures = FailureStore(self.rendezvous.require_store, worker)
        self.flags = DeferredFailureFlags(self._device, self._failures) if self._device.type == "cuda" else None
        self._stream: CommunicationStream | None = None
        self._ways: Counter[str] = Counter()
        self._prefetching: ProcessGroup | None = None

    def host_store(self) -> int:
        return self.rendezvous.host_store()

    def join_store(self, host: str, port: int, worker: int, token: str = "") -> None:
        self.rendezvous.join_store(host, port, worker, token)

    def lose_worker(self, worker: int) -> None:
        self.rendezvous.lost.add(worker)

    def leave(self) -> None:
        for group in self.groups.values():
            group.close()
        self.groups.clear()
        self._arena.close()
        self._arena = Arena()
        self._peer_memory.clear()
        self.in_flight = InFlightSends(wait_for_collective)
        self._prefetching = None
        self.rendezvous.leave()
        self._waits.close()

    def required_workers(self, members: Sequence[int]) -> tuple[int, ...]:
        """The members, and the worker that hosts the store."""
        return tuple(dict.fromkeys((*members, self.rendezvous.host)))

    def way_of(self, step: LocalStep) -> str:
        group = self.groups.get(step.members)
        return group.way_of(step) if group is not None else "none"  # the group could not be made

    def ways(self) -> dict[str, int]:
        return dict(self._ways)

    # Exchanges

    def begin(self, tasks: Sequence[MoveTask]) -> Work:
        return self.find_group(tasks[0].step.members).begin(tasks)

    def overlaps(self, tasks: Sequence[MoveTask]) -> bool:
        """Not through shared memory, where a member takes the parts of others itself."""
        group = self.groups.get(tasks[0].step.members)
        return isinstance(group, ProcessGroup) and all(work_of(task.step) in _GOING_ON for task in tasks)

    def begins_early(self, tasks: Sequence[MoveTask]) -> bool:
        """Any work of a process group is launched when it begins."""
        return isinstance(self.groups.get(tasks[0].step.members), ProcessGroup)

    @property
    def can_prefetch(self) -> bool:
        """Not with NCCL, which matches sends and receives by their order; and one exchange at a time."""
        group = self._prefetching
        return self._device.type != "cuda" and (group is None or not group.prefetched)

    def prefetch(self, step: LocalStep) -> None:
        group = self.groups.get(step.members)
        if isinstance(group, ProcessGroup) and self.can_prefetch and group.prefetch(step):
            self._prefetching = group

    # Groups

    def find_group(self, members: tuple[int, ...]) -> AnyGroup:
        """The group of a set of workers, of which this is one. Ranks follow the order of `members`."""
        found = self.groups.get(members)
        if found is None:
            found = self.groups[members] = self._make_group(members)
        return found

    def _make_group(self, members: tuple[int, ...]) -> AnyGroup:
        """Raises on all members where one could not be connected, so that all of them skip the same exchange."""
        store = self.rendezvous.new_attempt(members)
        memory = self._new_status()
        shared: SharedMemoryGroup | None = None
        try:
            status = f"{memory.descriptor} {memory.number}" if memory is not None else ""
            told = self.rendezvous.gather(store, members, "here", f"{secrets.token_hex(16)} {status}")
            nonces = [told[member].partition(" ")[0] for member in members]
            statuses = {member: text.partition(" ")[2] for member, text in told.items()}
            self.rendezvous.require_running(members)  # a member may have come and ended before the last one came
            if memory is not None and all(statuses.values()) and self._are_here(members):
                shared = self._try_shared(store, members, memory, statuses)
        finally:
            if memory is not None and shared is None:
                memory.close()
        return shared or self._make_process_group(store, members, nonces)

    def _are_here(self, members: tuple[int, ...]) -> bool:
        """Whether all members are on this machine: between machines no memory is shared."""
        found = [self.rendezvous.find_member(worker) for worker in members]
        return all(member is not None and member.is_here for member in found)

    def _new_status(self) -> MemoryFile | None:
        """Memory for the status of this worker in a new group; None if this worker does not share memory."""
        if not shares_memory(self._device.type, self._transport):
            return None
        try:
            return MemoryFile(STATUS_BYTES, reserved=STATUS_BYTES)
        except OSError as error:
            log.warning("worker %d has no memory to share with others: %s", self._worker, error)
            return None

    def _try_shared(
        self, store: SealedStore, members: tuple[int, ...], memory: MemoryFile, statuses: dict[int, str]
    ) -> SharedMemoryGroup | None:
        """A group that shares memory, if every member can map that of all others. All members decide alike."""
        peers: dict[int, GroupPeer] = {}
        spins = len(members) <= usable_cpus()
        problem = ""
        try:
            for worker in members:
                if worker != self._worker:
                    peers[worker] = self._map(worker, statuses[worker], spins=spins)
        except (OSError, ValueError) as error:
            problem = f"worker {self._worker} cannot map the memory of worker {worker}: {error}"
        problems = self.rendezvous.gather(store, members, "mapped", problem)
        if any(problems.values()):
            log.warning("workers %s do not share memory: %s", members, next(filter(None, problems.values())))
            return None
        return SharedMemoryGroup(self._worker, members, memory, peers, self._arena, self._failures, self._ways)

    def _map(self, worker: int, status: str, *, spins: bool) -> GroupPeer:
        member = self.rendezvous.find_member(worker)
        if member is None or not member.is_here:
            raise ValueError("it is on another machine")
        memory = self._peer_memory.setdefault(worker, PeerMemory(member))
        descriptor, number = map(int, status.split())
        return GroupPeer(worker, memory, (descriptor, number), partial(self.rendezvous.is_lost, worker), spins=spins)

    def _make_process_group(self, store: SealedStore, members: tuple[int, ...], nonces: Sequence[str]) -> ProcessGroup:
        """`nonces` are what the members have chosen for this group, in their order."""
        try:
            backend, problem = self._connect(store, members, nonces), ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        for member, told in self.rendezvous.gather(store, members, "connected", problem).items():
            if told:
                raise RuntimeError(f"worker {member} is not connected with the others of workers {members}: {told}")
        return ProcessGroup(
            self._worker,
            members,
            backend,
            self.in_flight,
            self._failures,
            self._ways,
            self._check_members,
            self.flags,
            self._waits,
        )

    def _check_members(self, members: tuple[int, ...]) -> None:
        for worker in members:
            if worker != self._worker and self.rendezvous.is_lost(worker):
                raise RuntimeError(f"worker {worker} is lost")

    def _connect(self, store: SealedStore, members: tuple[int, ...], nonces: Sequence[str]) -> GroupBackend:
        rank, size = members.index(self._worker), len(members)
        found = [self.rendezvous.find_member(worker) for worker in members]
        can_nccl = can_use_nccl([member.gpu for member in found if member is not None])
        if self._transport == "shared":
            raise RuntimeError(f"GT_TRANSPORT=shared, but workers {members} cannot share memory")
        if self._transport == "gloo" or (not can_nccl and self._transport != "nccl"):
            return self._connect_gloo(store, members, nonces)
        if not can_nccl:
            raise RuntimeError(f"GT_TRANSPORT=nccl needs a GPU for each of workers {members}")
        torch.cuda.set_device(self._device)
        self._choose_nccl_interface(members)
        group = make_nccl_group(self.rendezvous.group_store(members), rank, size, MEMBER_TIMEOUT)
        # All members are here now. A member with nothing to send or to receive does not come to the first exchange.
        group.eager_connect_single_device(self._device)
        self._stream = self._stream or CommunicationStream(self._device)
        return NcclGroup(group, self._device, self._stream)

    def _connect_gloo(self, store: SealedStore, members: tuple[int, ...], nonces: Sequence[str]) -> GlooGroup:
        """Members prove to each other that the dispatcher has introduced them, before they exchange anything."""
        rank, size = members.index(self._worker), len(members)
        address = self.rendezvous.listening_address(members)

        def connect(own: dist.Store) -> GlooGroup:
            group = GlooGroup(make_gloo_group(own, rank, size, address, CONNECT_TIMEOUT, MEMBER_TIMEOUT))
            store.prove_membership(group, rank, nonces, CONNECT_TIMEOUT)
            return group

        return self.rendezvous.connect_running(members, connect)

    def _choose_nccl_interface(self, members: tuple[int, ...]) -> None:
        """Let NCCL use the interface that reaches the other workers, unless the user has chosen one. It reads the
        variable when this process connects its first group."""
        address = self.rendezvous.listening_address(members)
        if not is_loopback(address) and (name := interface_of(address)):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _gpu_uuid(device: torch.device) -> str:
    """The uuid of a GPU, which is the same for all workers that share it, unlike its index; "" for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
