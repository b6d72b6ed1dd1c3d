"""Instructions on their way out: collected, freed tensors included, and sent when full, when read, or when idle."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from gt.core.errors import GTError
from gt.core.messages import CreateTensor, FreeTensors, Instruction
from gt.wire.channel import Buffer, ClientChannel

log = logging.getLogger("gt.client")

BATCH = 256  # instructions that make a batch worth sending
IDLE_SECONDS = 0.01  # an outbox that has not changed for this long is sent
FREE_COUNT, FREE_BYTES = 64, 1 << 20  # so many dead tensors, or dead bytes, make a FreeTensors worth sending
TAPE = 1024


class Outbox:
    """`refuse` raises where the session can no longer be used; `pace` blocks where the workers are too far behind."""

    def __init__(self, channel: ClientChannel, pace: Callable[[int], None]) -> None:
        self.tape: deque[Instruction] = deque(maxlen=TAPE)
        self._channel = channel
        self._pace = pace
        self._batch: list[Instruction] = []
        self._buffers: list[Buffer] = []
        self._dead: deque[int] = deque()
        self._dead_bytes = 0
        self._lock = threading.RLock()
        self._filled = threading.Event()
        self._open = True
        self._idler = threading.Thread(target=self._flush_when_idle, name="gt-idle-flush", daemon=True)
        self._idler.start()

    def emit(self, instruction: Instruction) -> None:
        if self._dead_bytes >= FREE_BYTES:
            self._free_dead()
        batch = self._batch
        batch.append(instruction)
        if len(batch) >= BATCH:
            self.flush()
        elif len(batch) == 1:
            self._filled.set()

    def emit_upload(self, instruction: CreateTensor, buffer: Buffer, at_once: bool) -> None:
        """`at_once` for a buffer that is the caller's own memory and may change after this returns."""
        with self._lock:
            self._batch.append(instruction)
            self._buffers.append(buffer)
            if at_once:
                self.flush()
        self._filled.set()

    def release(self, ident: int, nbytes: int) -> None:
        """A tensor was collected. Called from finalizers at any point of any thread, so it only takes note."""
        self._dead.append(ident)
        self._dead_bytes += nbytes + FREE_BYTES // FREE_COUNT

    def flush(self) -> None:
        with self._lock:
            self._free_dead()
            batch, self._batch = self._batch, []
            buffers, self._buffers = self._buffers, []
            self._filled.clear()
            if not batch:
                return
            self.tape.extend(batch)
            log.debug("sending %d instructions and %d tensors", len(batch), len(buffers))
            self._channel.send(batch, buffers)
        if self._channel.remote:
            self._pace(len(batch))

    def close(self) -> None:
        self._open = False
        self._filled.set()
        if self._idler is not threading.current_thread():
            self._idler.join(timeout=5)

    def _free_dead(self) -> None:
        self._dead_bytes = 0
        ids = []
        while self._dead:
            ids.append(self._dead.popleft())
        if ids:
            self._batch.append(FreeTensors(tuple(ids)))

    def _flush_when_idle(self) -> None:
        while self._open:
            self._filled.wait()
            batch, length = self._batch, len(self._batch)
            time.sleep(IDLE_SECONDS)
            if self._open and batch is self._batch and length == len(batch):
                try:
                    self.flush()
                except GTError:
                    log.info("an idle flush failed; the next read tells why", exc_info=True)
