"""Tensors between worker processes, by torch.distributed process groups.

One group per set of workers, made on demand from the store that one worker hosts. Groups need no global world, so
workers may come and go. The dispatcher orders all exchanges, so every member of one reaches it at the same place
of the order.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec
import torch
import torch.distributed as dist

from gt.core.messages import Failure
from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange import Received, Swap
from gt.worker.sent import Sent
from gt.worker.values import Failing

TIMEOUT = timedelta(seconds=60)  # for the members of a new group to meet
PATIENCE = timedelta(hours=1)  # for a tensor: its sender may have much to compute first, and one that dies is noticed
_Arriving: TypeAlias = tuple[Any, torch.Tensor]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Failure)


class GroupExchange:
    def __init__(self, worker: int, device: str) -> None:
        self._worker = worker
        self._device = torch.device(device)
        self._hosted: dist.TCPStore | None = None
        self._store: dist.Store | None = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._sent = Sent(self._wait)
        self._early: dict[int, _Arriving] = {}  # for the next swap that receives

    def host_store(self) -> int:
        self._hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return int(self._hosted.port)

    def join_store(self, host: str, port: int, name: str) -> None:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        self._store = dist.PrefixStore(name, store)

    def group(self, members: tuple[int, ...]) -> Any:
        """The process group of a set of workers, of which this is one. Ranks follow the order of `members`."""
        found = self._groups.get(members)
        if found is None:
            assert self._store is not None, "the dispatcher sends the store's address before any transfer"
            store = dist.PrefixStore(",".join(map(str, members)), self._store)
            found = self._groups[members] = self._make(store, members.index(self._worker), len(members))
        return found

    def _make(self, store: dist.Store, rank: int, size: int) -> Any:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            return dist.ProcessGroupNCCL(store, rank, size, options)
        return dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    def swap(self, swap: Swap, engine: Engine) -> Received:
        """One message for each peer: eight bytes with the length of a failure (0: none), then the tensor's bytes. A
        failure follows in a message of its own.

        Waits for what it receives and not for what it sends. Where one peer is gone the others still get and give
        theirs, so that they stay in step; what happened is raised after that.
        """
        group = self.group(swap.members)
        ranks = {member: rank for rank, member in enumerate(swap.members)}
        errors: list[Exception] = []
        arriving: dict[int, _Arriving] = {}
        if swap.receives:
            arriving, self._early = self._early, {}
        self._sent.make_room(sum([meta.nbytes for meta, _ in swap.sends.values()]))
        with self._together(group):
            for peer, parcel in swap.sends.items():
                with _gathered(errors):
                    self._sent.add(peer, *self._send(group, ranks[peer], *parcel, engine))
            for peer, meta in swap.receives.items():
                with _gathered(errors):
                    if peer not in arriving:
                        arriving[peer] = self._receive(group, ranks[peer], 8 + meta.nbytes)
        received: Received = {}
        for peer, (work, buffer) in arriving.items():
            with _gathered(errors):
                self._wait(work)
                received[peer] = self._unpack(group, ranks[peer], buffer, swap.receives[peer], engine)
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
        group = self._groups.get(swap.members)
        if group is None or self.is_expecting:
            return
        for peer, meta in swap.receives.items():
            with _gathered([]):  # a peer that is gone is noticed when its tensor is needed
                self._early[peer] = self._receive(group, swap.members.index(peer), 8 + meta.nbytes)

    def _wait(self, work: Any) -> None:
        """On a GPU the stream waits, and not this thread."""
        work.wait() if self._device.type == "cuda" else work.wait(PATIENCE)

    def _send(
        self, group: Any, rank: int, meta: TensorMeta, value: Value | Failing, engine: Engine
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Gives the buffers too: they must live until they are sent."""
        if not isinstance(value, Failing):
            data = torch.as_tensor(engine.bytes_of(value))
            buffers = [torch.cat([self._header(0), data.to(self._device)])]
        else:
            told = _encoder.encode(value.failure)
            expected = torch.zeros(meta.nbytes, dtype=torch.uint8, device=self._device)
            buffers = [
                torch.cat([self._header(len(told)), expected]),
                torch.frombuffer(bytearray(told), dtype=torch.uint8).to(self._device),
            ]
        return [group.send([buffer], rank, 0) for buffer in buffers], buffers

    def _receive(self, group: Any, rank: int, nbytes: int) -> _Arriving:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return group.recv([buffer], rank, 0), buffer

    def _unpack(self, group: Any, rank: int, buffer: torch.Tensor, meta: TensorMeta, engine: Engine) -> Value | Failing:
        length = int(buffer[:8].cpu().view(torch.int64).item())
        if length:
            work, told = self._receive(group, rank, length)
            self._wait(work)
            return Failing(_decoder.decode(told.cpu().numpy().tobytes()))
        value = engine.empty(meta)
        if meta.nbytes:
            torch.as_tensor(engine.bytes_of(value)).copy_(buffer[8:])
        return value

    def _header(self, length: int) -> torch.Tensor:
        return torch.tensor([length], dtype=torch.int64, device=self._device).view(torch.uint8)

    @contextmanager
    def _together(self, group: Any) -> Generator[None]:
        """NCCL needs to know which sends and receives belong together, or they wait for each other."""
        if self._device.type != "cuda":
            yield
            return
        group._group_start()
        try:
            yield
        finally:
            group._group_end()


@contextmanager
def _gathered(errors: list[Exception]) -> Generator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)
