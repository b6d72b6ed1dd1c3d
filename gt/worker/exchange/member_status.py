"""The words in shared memory by which the members of a group tell each other how far they are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

from gt.worker.exchange import futex
from gt.worker.exchange.arena import KEPT_BYTES, ArenaBlock, map_peer_memory, memory_address
from gt.worker.exchange.rendezvous import MEMBER_TIMEOUT, Member

STATUS_BYTES = 4096
SLOTS = 32  # exchanges that a member may be ahead of the others
_SPIN_SECONDS = 30e-6  # before a member sleeps
_FINISH_SECONDS = 0.001  # between two looks at a member that has not finished; it may miss that others wait for it
_CHECK_SECONDS = 0.05  # between two looks at the member that an exchange waits for

# Words: the numbers of the last exchange published and of the last one finished, whether the member has given up the
# group, and whether it waits for others to finish; then a slot for each of the last exchanges.
_PUBLISHED, _FINISHED, _GIVEN_UP, _WAITS, _FIRST_SLOT = 0, 1, 2, 3, 8
_SLOT_WORDS = 8
assert 8 * (_FIRST_SLOT + SLOTS * _SLOT_WORDS) <= STATUS_BYTES


class MemberGone(RuntimeError):
    """A member takes no part in the exchanges of its group any more."""


class Published(NamedTuple):
    """The block that a member gives in an exchange, and the memory it is in: its number, file descriptor and size. The
    number is 0 if the member gives no block. `has_failed`: it should have given one, and could not write it."""

    memory: int
    descriptor: int
    memory_bytes: int
    offset: int
    nbytes: int
    has_failed: int


class MemberStatus:
    """The status of one member: words in shared memory, which only that member writes."""

    def __init__(self, data: memoryview) -> None:
        self._words = data.cast("q")
        self._address = memory_address(data)

    def publish(self, number: int, block: ArenaBlock | None, *, has_failed: bool = False) -> None:
        memory = block.memory if block is not None else None
        if block is None or memory is None:
            record = (0, 0, 0, 0, 0, int(has_failed))
        else:
            record = (memory.number, memory.descriptor, memory.nbytes, block.offset, block.nbytes, 0)
        at = _slot(number)
        for word, value in enumerate(record, at):
            self._words[word] = value
        self._words[_PUBLISHED] = number  # last: a member that sees the number sees all earlier writes
        futex.wake(self._address)

    def finish(self, number: int, *, wakes: bool) -> None:
        self._words[_FINISHED] = number
        if wakes:
            futex.wake(self._address + 8 * _FINISHED)

    def give_up(self) -> None:
        """Tell the others that this member does no more exchanges of the group."""
        self._words[_GIVEN_UP] = 1
        futex.wake(self._address)
        futex.wake(self._address + 8 * _FINISHED)

    @property
    def waits(self) -> bool:
        """Whether the member waits for others to finish. They may see that late, so it does not rely on being woken."""
        return bool(self._words[_WAITS])

    @waits.setter
    def waits(self, value: bool) -> None:
        self._words[_WAITS] = value

    @property
    def finished(self) -> int:
        return self._words[_FINISHED]

    @property
    def has_given_up(self) -> bool:
        return bool(self._words[_GIVEN_UP])

    def published(self, number: int) -> Published:
        at = _slot(number)
        return Published(*self._words[at : at + len(Published._fields)])

    def wait(
        self, word: int, number: int, *, spins: bool, check: Callable[[], None], pause: float = _CHECK_SECONDS
    ) -> None:
        """Wait until a word has reached a number. `check` is called after every `pause`, and raises if the member is
        lost."""
        words = self._words
        if words[word] >= number:
            return
        if spins:
            end = time.perf_counter() + _SPIN_SECONDS
            while words[word] < number and time.perf_counter() < end:
                pass
        deadline = time.monotonic() + MEMBER_TIMEOUT.total_seconds()
        while (seen := words[word]) < number:
            if words[_GIVEN_UP]:
                raise MemberGone("a member has given up the exchanges of its group, after an error of its own")
            futex.wait(self._address + 8 * word, seen & 0xFFFFFFFF, pause)
            if words[word] < number:
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a member has not come to an exchange within {MEMBER_TIMEOUT}")


def _slot(number: int) -> int:
    return _FIRST_SLOT + number % SLOTS * _SLOT_WORDS


class PeerMemory:
    """The memory of another worker, as far as it is mapped. All groups with that worker share the mapping, since the
    first use of each page of a mapping costs more than the copy."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._number = 0
        self._kept = memoryview(b"")

    def block(self, found: Published) -> memoryview:
        data = self._kept if found.memory == self._number else self._map(found)
        return data[found.offset : found.offset + found.nbytes]

    def _map(self, found: Published) -> memoryview:
        pid, mark = self.member.pid, self.member.mark
        data = map_peer_memory(pid, mark, found.descriptor, found.memory, found.memory_bytes)
        if found.memory_bytes == KEPT_BYTES:
            self._number, self._kept = found.memory, data
        return data


class GroupPeer:
    """Another member of a group: its memory, and its status, given by the descriptor and the number of its memory
    file. `is_lost` says whether the peer's process has ended or was given up; it may raise to end a wait."""

    def __init__(
        self, worker: int, memory: PeerMemory, status: tuple[int, int], is_lost: Callable[[], bool], *, spins: bool
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._is_lost = is_lost
        self._is_gone = False
        self._spins = spins
        member = memory.member
        self._status = MemberStatus(map_peer_memory(member.pid, member.mark, *status, STATUS_BYTES))

    @property
    def waits(self) -> bool:
        return self._status.waits

    def has_finished(self, number: int) -> bool:
        """Whether the peer reads nothing any more of an exchange."""
        return self._status.finished >= number or self._is_gone or self._status.has_given_up

    def wait_for_finish(self, number: int) -> None:
        with contextlib.suppress(MemberGone):
            self._status.wait(_FINISHED, number, spins=self._spins, check=self._check, pause=_FINISH_SECONDS)

    def _check(self) -> None:
        self._is_gone = self._is_gone or self._is_lost()
        if self._is_gone:
            raise MemberGone(f"worker {self._worker} is lost")

    def block(self, number: int) -> memoryview | None:
        """Wait for an exchange, and return the memory that the peer gives in it; None if it has failed."""
        self._status.wait(_PUBLISHED, number, spins=self._spins, check=self._check)
        found = self._status.published(number)
        return None if found.has_failed else self._memory.block(found)
