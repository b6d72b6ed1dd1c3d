"""Uploads and reads of tensors: how the bytes of clients become tensors of a worker, and tensors become bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, TypeAlias

from gt.core.messages import (
    CURRENT,
    ByteRange,
    Failed,
    Fetched,
    ReadVersions,
    Report,
    Uploaded,
    Versions,
    WorkerCreateTensor,
    WorkerFetchTensor,
)
from gt.wire.codec import Buffer
from gt.wire.held_frames import HeldBytes
from gt.worker.engines.engine import Engine
from gt.worker.failed_value import FailedValue
from gt.worker.op_runner import OpRunner

WriteBytes: TypeAlias = Callable[[memoryview], None]
Export: TypeAlias = Callable[[int, ByteRange | None, WriteBytes], tuple[ByteRange, memoryview]]
"""Writes a tensor that leaves the worker to memory: given its size, the client's shared memory for it, if any, and a
function that writes the bytes. Returns the byte range and its memory."""


class ReportWithBytes(Protocol):
    def __call__(self, report: Report, buffer: Buffer | None = None) -> None: ...


class TensorTransfers:
    """Creates and reads the tensors of a runner. `buffers` are the bytes of the tensors that the present batch creates.
    `owns_buffers`: a tensor may use the memory of its buffer. `settle` makes sure that failures are known before a
    value leaves the worker."""

    def __init__(
        self,
        runner: OpRunner,
        engine: Engine,
        export: Export,
        settle: Callable[[], None],
        report: ReportWithBytes,
        *,
        owns_buffers: bool,
    ) -> None:
        self.buffers: Iterator[Buffer | HeldBytes] = iter(())
        self._runner = runner
        self._engine = engine
        self._export = export
        self._settle = settle
        self._report = report
        self._owns_buffers = owns_buffers

    def create(self, command: WorkerCreateTensor) -> None:
        try:
            buffer = next(self.buffers)  # even if there is no room for it: the next upload has the next buffer
            self._runner.guard.reserve(command.byte_range.nbytes)
            if isinstance(buffer, HeldBytes):
                buffer = buffer.read()
            is_owned = self._owns_buffers and not command.byte_range.name
            self._runner.tensors[command.id] = self._engine.from_buffer(buffer, command.meta, is_owned)
        except Exception as error:
            self._runner.fail_command(command, error)
        if command.byte_range.name:
            self._report(Uploaded(command.id))

    def fetch(self, command: WorkerFetchTensor) -> None:
        """Send the bytes of a tensor, or of an earlier version of it, to the client."""
        self._settle()
        value = self._runner.steps.version(command.id, self._runner.tensors[command.id], command.version)
        if isinstance(value, FailedValue):
            self._report(Failed(command.request, value.failure))
            return
        write = partial(self._engine.read_into, value)
        byte_range, data = self._export(self._engine.nbytes(value), command.place, write)
        self._report(Fetched(command.request, byte_range), data)

    def read(self, ident: int) -> Buffer | None:
        """The bytes of a tensor; None if it has failed."""
        value = self._runner.steps.version(ident, self._runner.tensors[ident], CURRENT)
        if isinstance(value, FailedValue):
            return None
        return self._export(self._engine.nbytes(value), None, partial(self._engine.read_into, value))[1]

    def read_versions(self, command: ReadVersions) -> None:
        """Tell the client which versions of tensors it can read."""
        runner = self._runner
        runner.overlapped.finish_all()
        held = [ident for ident in command.ids if ident in runner.tensors]
        spans = tuple((ident, runner.steps.span(ident, runner.tensors[ident])) for ident in held)
        self._report(Versions(command.request, spans))
