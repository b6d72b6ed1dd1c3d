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
REST_AFTER = 50  # looks at an empty outbox
# So many dead tensors, or dead bytes, make a FreeTensors worth sending. Few bytes: what is freed soon is still in the
# cache when it is allocated again, which matters more than the cost of freeing.
FREE_COUNT, FREE_BYTES = 64, 1 << 17
TAPE = 1024


class Outbox:
    """`refuse` raises where the session can no longer be used; `pace` blocks where the workers are too far behind."""

    def __init__(self, channel: ClientChannel, pace: Callable[[int], None]) -> None:
        self.tape: deque[Instruction] = deque(maxlen=TAPE)
        self._channel = channel
        self._pace = pace
        self._queue: deque[Instruction] = deque()  # appended to by any thread, drained by whoever flushes
        self._buffers: list[Buffer] = []
        self._dead: deque[int] = deque()
        self._dead_bytes = 0
        self._sent = 0
        self._lock = threading.RLock()
        self._filled = threading.Event()
        self._resting = False
        self._open = True
        self._idler = threading.Thread(target=self._flush_when_idle, name="gt-idle-flush", daemon=True)
        self._idler.start()

    def emit(self, instruction: Instruction) -> None:
        if self._dead_bytes >= FREE_BYTES:
            self._free_dead()
        queue = self._queue
        queue.append(instruction)
        if len(queue) >= BATCH:
            self.flush()
        elif self._resting:
            self._filled.set()

    def emit_upload(self, instruction: CreateTensor, buffer: Buffer, at_once: bool) -> None:
        """`at_once` for a buffer that is the caller's own memory and may change after this returns."""
        with self._lock:
            self._queue.append(instruction)
            self._buffers.append(buffer)
            if at_once:
                self.flush()
        if self._resting:
            self._filled.set()

    def release(self, ident: int, nbytes: int) -> None:
        """A tensor was collected. Called from finalizers at any point of any thread, so it only takes note."""
        self._dead.append(ident)
        self._dead_bytes += nbytes + FREE_BYTES // FREE_COUNT

    def flush(self) -> None:
        with self._lock:
            self._free_dead()
            batch = [self._queue.popleft() for _ in range(len(self._queue))]
            buffers, self._buffers = self._buffers, []
            if not batch:
                return
            self._sent += 1
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
            self._queue.append(FreeTensors(tuple(ids)))

    def _flush_when_idle(self) -> None:
        """Look at the outbox every so often; rest when nothing happens. Whoever fills the outbox need not wake this
        thread while it looks by itself: waking it for every batch cost more than the ops of the batch."""
        seen, quiet = (0, 0), 0
        while self._open:
            time.sleep(IDLE_SECONDS)
            now = (self._sent, len(self._queue))
            if now[1] and now == seen:
                self._flush_quietly()
            quiet = 0 if now[1] else quiet + 1
            if quiet > REST_AFTER:
                self._rest()
                quiet = 0
            seen = now

    def _rest(self) -> None:
        self._filled.clear()
        self._resting = True
        if not self._queue and self._open:  # looked at after saying so: what comes now sets the event
            self._filled.wait()
        self._resting = False

    def _flush_quietly(self) -> None:
        try:
            self.flush()
        except GTError:
            log.info("an idle flush failed; the next read tells why", exc_info=True)
