"""Tensors between worker processes, by torch.distributed process groups.

One group per set of workers, made on demand from the store that one worker hosts. Groups need no global world, so
workers may come and go. The dispatcher orders all transfers, so both ends of one reach it at the same place of the
order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from gt.core.messages import Failure, WorkerTransfer
from gt.worker.engines.engine import Engine, Value

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

    def send(self, command: WorkerTransfer, engine: Engine, value: Value | None, failure: Failure | None) -> None:
        """A header with the length of a failure (0: none), then the failure or the tensor's bytes."""
        group, peer = self._pair(command, command.target)
        told = b"" if failure is None else _encoder.encode(failure)
        group.send([self._tensor([len(told)], torch.int64)], peer, 0).wait()
        if told:
            group.send([self._tensor(list(told), torch.uint8)], peer, 0).wait()
        elif command.meta.nbytes:
            group.send([torch.as_tensor(engine.bytes_of(value))], peer, 0).wait()

    def receive(self, command: WorkerTransfer, engine: Engine) -> tuple[Value | None, Failure | None]:
        group, peer = self._pair(command, command.source)
        header = self._tensor([0], torch.int64)
        group.recv([header], peer, 0).wait()
        if length := int(header.item()):
            told = self._tensor([0] * length, torch.uint8)
            group.recv([told], peer, 0).wait()
            return None, _decoder.decode(bytes(told.tolist()))
        value = engine.empty(command.meta)
        if command.meta.nbytes:
            group.recv([torch.as_tensor(engine.bytes_of(value))], peer, 0).wait()
        return value, None

    def _pair(self, command: WorkerTransfer, other: int) -> tuple[Any, int]:
        members = tuple(sorted((command.source, command.target)))
        return self.group(members), members.index(other)

    def _tensor(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)
