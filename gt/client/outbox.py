"""The queue of instructions: sent to the dispatcher when a batch is full, before a read, or after 10 ms without ops."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, islice, repeat
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from gt.client.call_log import CallLog
from gt.client.flow_control import BATCH
from gt.client.interrupts import CriticalSection, is_inside
from gt.client.program_matcher import ProgramMatcher
from gt.client.storage import Storage, TensorRef, collect_into, is_collected_into
from gt.core.errors import GTError, ReadOnlyError, SessionError
from gt.core.messages import CreateTensor, FreeTensors, Instruction
from gt.wire.client_channel import ClientChannel, Upload, as_buffer

log = logging.getLogger("gt.client")

IDLE_SECONDS = 0.01  # an outbox that has not changed for this long is sent
REST_AFTER = 50  # empty polls after which the idle thread sleeps until it is woken by an instruction
REST_SECONDS = 0.25  # how often the idle thread looks for dead tensors then: finalizers do not wake it
# So many dead tensors, or dead bytes, make a FreeTensors worth sending: `_dead_cost` adds up both. Few bytes: memory
# that is freed soon is still in the cache when it is allocated again, which matters more than the cost of freeing.
FREE_COUNT, FREE_BYTES = 64, 1 << 17
_COST_OF_EACH = FREE_BYTES // FREE_COUNT
FREE_AT_ONCE = 1 << 14  # tensors that one FreeTensors names
TAPE = 1024  # sent instructions that are kept for gt.debug

_now, _append = time.monotonic_ns, deque.append  # looked up once: a capture needs them for each op
_read_id = attrgetter("id")
_is_of_closed_session = attrgetter("session.closed_because")

BuildInstruction: TypeAlias = Callable[[tuple[int, ...]], Any]
"""Makes the instruction that names tensors with these ids."""


class Outbox:
    """Queues instructions, and sends them in batches.

    `lock` is held from reading the ids of tensors until the instruction that names them is queued: another thread that
    writes to one of them in between would give it a new id.

    `collect` takes the answers of workers in this process, which are complete when a batch was sent; `pace` blocks
    if other workers are too far behind; `break_off` is called when a batch was sent in part. The `matcher` finds
    repeated runs of ops in a batch, and the `call_log`, if there is one, shows what is sent.

    `collected` gets the storages that are no longer referenced, at any point of any thread. A recorder of `gt.compile`
    has them held there until it has noted them, and passes them on with `pass_on`.
    """

    def __init__(
        self,
        channel: ClientChannel,
        collect: Callable[[], object],
        pace: Callable[[int], None],
        break_off: Callable[[str], None],
        matcher: ProgramMatcher,
        call_log: CallLog | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.tape: deque[Instruction] = deque(maxlen=TAPE)
        self.queue: deque[Instruction] = _InstructionQueue()
        self._channel = channel
        self._collect = collect
        self._pace = pace
        self._break_off = break_off
        self._matcher = matcher
        self._call_log = call_log
        self._uploads: dict[int, Upload] = {}
        self.collected: deque[Storage] = deque()
        self._dead = self.collected  # storages to free: another deque while a recorder holds those that are collected
        self.read_only: dict[int, str] = {}  # names of published tensors, by the ids that they have here
        self._unsent_ids: list[int] = []  # ids of dead tensors, after an interrupt
        self._dead_cost = 0
        self._counted = 0  # storages of `_dead` that are part of the cost
        self._extra_ops = 0  # ops of queued segments beyond one each
        self._batches_sent = 0
        self._sending = threading.RLock()
        self._filled: SimpleQueue[None] = SimpleQueue()  # wakes the idle thread
        self._is_resting = False
        self._is_open = True
        collect_into(self.collected)
        self._idler = threading.Thread(target=self._flush_when_idle, name="gt-idle-flush", daemon=True)
        self._idler.start()

    def emit(self, instruction: Instruction) -> None:
        """Queue an instruction without the lock: it names no tensors, or no other thread runs. Hot path."""
        queue = self.queue
        queue.append(instruction)
        dead = self._dead
        if (count := len(dead)) != self._counted:
            if count - self._counted == 1:  # the usual case, not worth a call
                try:
                    self._dead_cost += dead[-1].geometry.nbytes + _COST_OF_EACH
                    self._counted = count
                except IndexError:  # another thread has freed it
                    self._counted = 0
            else:
                self._count_dead()
        if self._dead_cost >= FREE_BYTES or len(queue) >= BATCH or self._is_resting:
            self._trigger()

    @property
    def unrecorded(self) -> Outbox:
        """The outbox itself, for one that records what passes it."""
        return self

    def submit(
        self,
        build: BuildInstruction,
        refs: Sequence[TensorRef],
        written: Sequence[Storage] = (),
        new_ids: Sequence[int] = (),
    ) -> Any:
        """Queue the instruction that `build` makes of the ids of tensors, and return it. Storages that it writes to get
        new ids. Hot path."""
        if written and self.read_only:
            self._require_writable(written)
        with self.lock:
            instruction = build(tuple([ref.id for ref in refs]))
            if written:
                self._queue_write(instruction, written, new_ids)
            else:
                self.queue.append(instruction)
        if len(self._dead) != self._counted:
            self._count_dead()
        if self._dead_cost >= FREE_BYTES or len(self.queue) >= BATCH or self._is_resting:
            self._trigger()
        return instruction

    def submit_all(
        self,
        build: Callable[[tuple[int, ...]], tuple[tuple[int, ...], Sequence[Instruction]]],
        storages: Sequence[Storage],
        writes: Sequence[tuple[int, int]],
        extra_ops: int,
    ) -> tuple[int, ...]:
        """Queue the instructions that `build` makes of the ids of storages, together with a table of ids, which is
        returned. `writes` are storages that get new ids, by position, and the positions of these ids in the table.
        `extra_ops` is the number of ops beyond one for each instruction. The caller is in a critical section, and calls
        `send_if_full` after it."""
        if writes and self.read_only:
            self._require_writable([storages[storage] for storage, _ in writes])
        with self.lock:
            self._count_dead()
            if self._dead_cost >= FREE_BYTES:  # before the instructions, which may be a whole step
                self._free_dead()
            table, instructions = build(tuple([storage.id for storage in storages]))
            self.queue.extend(instructions)
            self._extra_ops += extra_ops
            for storage, ident in writes:
                storages[storage].id = table[ident]
        return table

    def _require_writable(self, written: Iterable[Storage]) -> None:
        for storage in written:
            name = self.read_only.get(storage.id)
            if name is not None:
                raise ReadOnlyError(
                    f"this tensor is gt.subscribe({name!r}), which another session has published and which cannot be "
                    f"written; write to a copy of it: x.clone()"
                )

    def send_if_full(self) -> None:
        """Send the queue if it is long enough for a batch."""
        self._count_dead()
        if self._extra_ops >= BATCH and not is_inside():
            self.flush(is_final=False)
        elif self._dead_cost >= FREE_BYTES or len(self.queue) >= BATCH or self._is_resting:
            self._trigger()

    def _queue_write(self, instruction: Instruction, written: Sequence[Storage], new_ids: Sequence[int]) -> None:
        """Storages get their new ids when the instruction is queued, in one call of C: Python runs signal handlers
        after it. A handler's op in between would name an id that no instruction has made."""
        steps = chain(map(self.queue.append, (instruction,)), map(setattr, written, repeat("id"), new_ids))
        deque(steps, maxlen=0)

    def swap_ids(self, first: Storage, second: Storage) -> None:
        with self.lock:
            first.id, second.id = second.id, first.id

    def _trigger(self) -> None:
        """Send the queue, or wake the idle thread, after an instruction was queued."""
        if self._dead_cost >= FREE_BYTES:
            self._free_dead()
        if len(self.queue) >= BATCH:
            if not is_inside():  # otherwise a finalizer or signal handler runs inside a flush: it must not flush
                self.flush(is_final=False)
        elif self._is_resting:
            self._filled.put(None)

    def emit_upload(self, instruction: CreateTensor, upload: Upload, at_once: bool) -> None:
        """The caller may change the bytes: a large upload is sent `at_once`, a small one is copied."""
        self._uploads[instruction.id] = upload if at_once else bytearray(as_buffer(upload))
        self.queue.append(instruction)
        if at_once:
            self.flush()
        elif self._is_resting:
            self._filled.put(None)

    def _count_dead(self) -> None:
        """Add the tensors that have died since the last time to the cost."""
        dead = self._dead
        count = len(dead)
        try:
            self._dead_cost += sum([dead[n].geometry.nbytes + _COST_OF_EACH for n in range(self._counted, count)])
        except IndexError:  # another thread has freed some
            count = 0
        self._counted = count

    def due_frees(self) -> tuple[int, ...]:
        """The dead tensors that are freed after the next instruction."""
        self._count_dead()
        return tuple(map(_read_id, self._dead)) if self._dead_cost >= FREE_BYTES else ()

    def hold_collected(self) -> None:
        """Free only those storages from now on that `pass_on` names."""
        self._dead = deque()

    def pass_on(self, count: int) -> None:
        """Free the first storages of `collected`, which are held."""
        _move(self.collected, self._dead, count)

    def free_collected(self) -> None:
        """Free storages when they are collected, after `hold_collected`."""
        held, self._dead = self._dead, self.collected
        _move(held, self._dead, len(held))

    def record_times(self, limit: int) -> None:
        """Note the times of the next `limit` instructions that are queued, until `take_times`."""
        if isinstance(self.queue, _InstructionQueue):
            self.queue.times = deque(maxlen=limit)
            self.queue.__class__ = _TimedQueue

    def take_times(self) -> list[tuple[int, Instruction]]:
        """The instructions that were noted, with the times at which they were queued."""
        queue = self.queue
        if not isinstance(queue, _TimedQueue):
            return []
        queue.__class__ = _InstructionQueue  # type: ignore[assignment]
        return [queue.times.popleft() for _ in range(len(queue.times))]

    def refuse(self, reason: str) -> None:
        """Refuse instructions from now on, and ignore tensors that are collected."""
        self.queue = _ClosedQueue(reason)
        if is_collected_into(self.collected):
            collect_into(deque(maxlen=0))
        self._dead.clear()
        self.collected.clear()
        self._is_resting = False

    def flush(self, *, is_final: bool = True) -> None:
        """Send the queued instructions. If it is not `is_final`, the beginning of a repeated run of ops may stay."""
        with CriticalSection():
            batch, uploads, extra_ops = self._begin()
            try:
                if not batch:
                    return
                self._batches_sent += 1
                self._send(batch, uploads, is_final)
            finally:
                self._sending.release()
        if self._channel.is_asynchronous:
            self._pace(len(batch) + extra_ops)

    def _begin(self) -> tuple[list[Instruction], list[Upload], int]:
        """Become the thread that sends, and take the batch to send. Never blocks on `_sending` while holding `lock`: a
        signal handler may need the other one."""
        while True:
            with self.lock:
                if self._sending.acquire(blocking=False):
                    return self._take()
            with self._sending:
                pass

    def _send(self, batch: list[Instruction], uploads: list[Upload], is_final: bool) -> None:
        """Send a batch, with its repeated runs of ops as segments. The instructions at its end that stay in the queue
        are removed from it."""
        try:
            compressed, rest = self._matcher.compress(batch, is_final=is_final)
            if rest:
                with self.lock:
                    self.queue.extendleft(reversed(rest))
                del batch[-len(rest) :]
            self.tape.extend(batch)
            if self._call_log is not None:
                self._call_log.note_batch(compressed, len(uploads))
            if compressed:
                self._channel.send(compressed, uploads)
            if not self._channel.is_asynchronous:
                self._collect()
        except GTError:
            raise
        except BaseException as error:  # raised by a signal handler, or a bug
            name = "Ctrl-C, twice," if isinstance(error, KeyboardInterrupt) else type(error).__name__
            self._break_off(f"{name} has ended the session in the middle of its work")
            raise

    def _take(self) -> tuple[list[Instruction], list[Upload], int]:
        """The queued instructions, their uploads, and the number of ops beyond one for each instruction."""
        self._free_dead()
        queue = self.queue
        extra_ops, self._extra_ops = self._extra_ops, 0
        batch = [queue.popleft() for _ in range(len(queue))]  # other threads may add more meanwhile
        uploads = [self._uploads.pop(created.id) for created in batch if type(created) is CreateTensor]
        return batch, uploads, extra_ops

    def close(self) -> None:
        self._is_open = False
        self._filled.put(None)
        if self._idler is not threading.current_thread():
            self._idler.join(timeout=5)

    def _free_dead(self) -> None:
        self._dead_cost = self._counted = 0
        while self._dead or self._unsent_ids:
            self._free(min(len(self._dead), FREE_AT_ONCE))

    def _free(self, count: int) -> None:
        """Queue a FreeTensors for dead tensors. An interrupt may come at any point, and loses none of them."""
        ids, self._unsent_ids = self._unsent_ids, []
        message = None
        try:
            with contextlib.suppress(IndexError):  # other threads take from it too
                ids.extend(map(_read_id, filterfalse(_is_of_closed_session, _popping(self._dead, count))))
            if ids:
                message = FreeTensors(tuple(ids))
                self.queue.append(message)
        except BaseException:
            if message is None or not self.queue or self.queue[-1] is not message:
                self._unsent_ids = ids
            raise

    def _flush_when_idle(self) -> None:
        """Poll the outbox, and rest when it stays empty. Threads that fill it need not wake this one while it polls:
        waking it for every batch cost more than the ops of the batch."""
        seen, quiet = (0, 0), 0
        while self._is_open:
            time.sleep(IDLE_SECONDS)
            now = (self._batches_sent, len(self.queue) + len(self._dead))
            if now[1] and now == seen:
                self._flush_quietly()
            quiet = 0 if now[1] else quiet + 1
            if quiet > REST_AFTER:
                self._rest()
                quiet = 0
            seen = now

    def _rest(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._filled.get_nowait()
        self._is_resting = True
        # Checked after `_is_resting` is set: an instruction queued from now on wakes this thread.
        while not self.queue and not self._dead and self._is_open:
            with contextlib.suppress(Empty):
                self._filled.get(timeout=REST_SECONDS)
        self._is_resting = False

    def _flush_quietly(self) -> None:
        try:
            self.flush()
        except GTError:
            log.info("an idle flush failed; the next read tells why", exc_info=True)
        except Exception:
            log.exception("an idle flush failed")


def _popping(storages: deque[Storage], count: int) -> Iterator[Storage]:
    """Storages as they are removed from a deque. Made of C functions: so is what consumes it, and no interrupt comes
    between."""
    return islice(iter(storages.popleft, None), count)


def _move(source: deque[Storage], target: deque[Storage], count: int) -> None:
    with contextlib.suppress(IndexError):  # another thread takes from it too
        target.extend(_popping(source, count))


class _InstructionQueue(deque[Instruction]):
    """The queue of an open outbox. It changes its class, not the object, to note times: other threads use it."""

    times: deque[tuple[int, Instruction]]


class _TimedQueue(_InstructionQueue):
    """Notes when instructions are queued; the oldest are dropped where there is no room."""

    def append(self, instruction: Instruction) -> None:
        self.times.append((_now(), instruction))
        _append(self, instruction)

    def extend(self, instructions: Iterable[Instruction]) -> None:
        batch = list(instructions)
        now = _now()
        self.times.extend([(now, instruction) for instruction in batch])
        super().extend(batch)


class _ClosedQueue(deque[Instruction]):
    """The queue of a closed outbox: it refuses instructions, and tells why."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def append(self, instruction: Instruction) -> None:
        raise SessionError(self._reason)
