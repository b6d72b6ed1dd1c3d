"""Boxes of several tasks in one buffer of bytes, as process groups exchange them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.interface import MoveTask
from gt.worker.exchange.local_steps import Slices
from gt.worker.failed_value import FailedValue

_ALIGNMENT = 16  # of every box, so that it can be viewed as a tensor of any dtype


class MessageLayout:
    """The metas and offsets of one box for each task, None for tasks without one. A flag before each box tells whether
    its sender has no value."""

    def __init__(self, metas: Sequence[TensorMeta | None]) -> None:
        self.metas = tuple(metas)
        self._offsets: list[int] = []
        self.nbytes = 0
        for meta in metas:
            self._offsets.append(self.nbytes)
            if meta is not None:
                self.nbytes += _ALIGNMENT + -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT

    def write(
        self, buffer: torch.Tensor, task: MoveTask, position: int, slices: Slices, doubt: torch.Tensor | None = None
    ) -> FailedValue | None:
        """Write one box of a task's value, or its flag; returns the failure that the flag stands for."""
        value, at = task.value, self._offsets[position]
        if not isinstance(value, FailedValue):
            value = task.attempt(lambda: self._copy(buffer, position, task, slices))
        write_flag(buffer[at], value, doubt)
        return value if isinstance(value, FailedValue) else None

    def _copy(self, buffer: torch.Tensor, position: int, task: MoveTask, slices: Slices) -> None:
        value = task.box(slices)
        if not isinstance(value, torch.Tensor):
            box = task.engine.empty(self._meta(position))
            box[...] = value
            self._bytes(buffer, position).copy_(torch.as_tensor(task.engine.bytes_of(box)))
            return
        self._view(buffer, position).copy_(value)

    def flag(self, buffer: torch.Tensor, position: int) -> torch.Tensor:
        return buffer[self._offsets[position]]

    def box(self, engine: Engine, buffer: torch.Tensor, position: int) -> Value:
        """The box of a task, over the memory of the buffer if the engine can use that."""
        if buffer.device.type != "cpu":
            return self._view(buffer, position)
        data = memoryview(self._bytes(buffer, position).numpy())
        return engine.from_buffer(data, self._meta(position), True)

    def _meta(self, position: int) -> TensorMeta:
        meta = self.metas[position]
        assert meta is not None
        return meta

    def _bytes(self, buffer: torch.Tensor, position: int) -> torch.Tensor:
        start = self._offsets[position] + _ALIGNMENT
        return buffer[start : start + self._meta(position).nbytes]

    def _view(self, buffer: torch.Tensor, position: int) -> torch.Tensor:
        meta = self._meta(position)
        flat = self._bytes(buffer, position).view(getattr(torch, meta.dtype))
        return flat.as_strided(meta.shape, meta.stride, flat.storage_offset())


def write_flag(target: torch.Tensor, value: Value | FailedValue, doubt: torch.Tensor | None) -> None:
    """Set a flag if a value has failed or, on the device, if that is in doubt."""
    if isinstance(value, FailedValue) or doubt is None:
        target.fill_(int(isinstance(value, FailedValue)))
    else:
        target.copy_(doubt)
