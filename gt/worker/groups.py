"""Tensors between worker processes, by torch.distributed process groups.

One group per set of workers, made on demand from the store that one worker hosts. Groups need no global world, so
workers may come and go. The dispatcher orders all exchanges, so every member of one reaches it at the same place
of the order.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from gt.core.messages import Failure
from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange import Received, Swap
from gt.worker.values import Failing

TIMEOUT = timedelta(seconds=60)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Failure)


class GroupExchange:
    def __init__(self, worker: int, device: str) -> None:
        self._worker = worker
        self._device = torch.device(device)
        self._hosted: dist.TCPStore | None = None
        self._store: dist.Store | None = None
        self._groups: dict[tuple[int, ...], Any] = {}

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
            options._timeout = TIMEOUT
            return dist.ProcessGroupNCCL(store, rank, size, options)
        return dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    def swap(self, swap: Swap, engine: Engine) -> Received:
        """One message for each peer: eight bytes with the length of a failure (0: none), then the tensor's bytes. A
        failure follows in a message of its own."""
        group = self.group(swap.members)
        ranks = {member: rank for rank, member in enumerate(swap.members)}
        with self._together(group):
            sent = [self._send(group, ranks[peer], *parcel, engine) for peer, parcel in swap.sends.items()]
            arriving = {
                peer: self._receive(group, ranks[peer], 8 + meta.nbytes) for peer, meta in swap.receives.items()
            }
        received: Received = {}
        for peer, (work, buffer) in arriving.items():
            work.wait()
            received[peer] = self._unpack(group, ranks[peer], buffer, swap.receives[peer], engine)
        for works, _ in sent:
            for work in works:
                work.wait()
        return received

    def _send(
        self, group: Any, rank: int, meta: TensorMeta, value: Value | Failing, engine: Engine
    ) -> tuple[list[Any], Any]:
        """Gives the buffers too: they must live until they are sent."""
        if not isinstance(value, Failing):
            data = torch.as_tensor(engine.bytes_of(value))
            buffer = torch.cat([self._header(0), data.to(self._device)])
            return [group.send([buffer], rank, 0)], buffer
        told = _encoder.encode(value.failure)
        expected = torch.zeros(meta.nbytes, dtype=torch.uint8, device=self._device)
        buffers = [
            torch.cat([self._header(len(told)), expected]),
            torch.frombuffer(bytearray(told), dtype=torch.uint8).to(self._device),
        ]
        return [group.send([buffer], rank, 0) for buffer in buffers], buffers

    def _receive(self, group: Any, rank: int, nbytes: int) -> tuple[Any, torch.Tensor]:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return group.recv([buffer], rank, 0), buffer

    def _unpack(self, group: Any, rank: int, buffer: torch.Tensor, meta: TensorMeta, engine: Engine) -> Value | Failing:
        length = int(buffer[:8].cpu().view(torch.int64).item())
        if length:
            work, told = self._receive(group, rank, length)
            work.wait()
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
