"""Memory that peers map: blocks are used again when they were read, and nothing stays open."""

import os
from pathlib import Path

import pytest

from gt.wire.process_identity import start_mark
from gt.worker.exchange import arena as arenas
from gt.worker.exchange.arena import KEPT_BYTES, MAX_OUTSTANDING, Arena, MemoryFile, map_peer_memory

HALF = KEPT_BYTES // 2


class Reader:
    """Holds blocks of an arena until they are read, oldest first."""

    def __init__(self):
        self.arena = Arena()
        self.read = 0
        self.waits = 0
        self._count = 0

    def hold(self, nbytes):
        block = self.arena.allocate(nbytes)
        self._count += 1
        number = self._count
        self.arena.hold(block, lambda: self.read >= number, lambda: self.wait(number))
        return block

    def wait(self, number):
        self.waits += 1
        self.read = max(self.read, number)


@pytest.fixture
def reader():
    made = Reader()
    yield made
    made.arena.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def mappings():
    return sum("memfd:gt" in line for line in Path("/proc/self/maps").read_text().splitlines())


def overlap(left, right):
    return left.memory is right.memory and (
        left.offset < right.offset + right.size and right.offset < left.offset + left.size
    )


def test_blocks_that_are_not_read_do_not_overlap(reader):
    blocks = [reader.hold(nbytes) for nbytes in (1, 64, 100, 5000, 0)]
    assert not any(overlap(one, other) for one in blocks for other in blocks if one is not other)
    assert {block.offset % 64 for block in blocks} == {0} and [len(block.data) for block in blocks][:4] == [
        1, 64, 100, 5000
    ]  # fmt: skip


def test_memory_is_used_from_its_start_when_all_was_read(reader):
    first = reader.hold(1000)
    reader.read = 1
    assert (reader.hold(1000).memory, reader.hold(1000).offset) == (first.memory, 1024)


def test_blocks_begin_again_at_the_start_of_memory_that_was_read(reader):
    first, second = reader.hold(HALF), reader.hold(HALF - 64)
    reader.read = 1
    third = reader.hold(1000)
    assert (third.memory, third.offset) == (first.memory, 0) and not overlap(second, third)


def test_a_block_without_room_gets_memory_of_its_own(reader):
    first, second = reader.hold(HALF), reader.hold(HALF)
    third = reader.hold(64)
    assert third.memory is not first.memory and second.memory is first.memory
    reader.read = 2
    assert reader.hold(64).memory is first.memory


def test_a_block_never_fills_the_gap_before_the_oldest_one(reader):
    """A full ring would look like an empty one."""
    reader.hold(HALF)
    reader.hold(HALF)
    reader.read = 1
    reader.hold(HALF - 64)
    reader.hold(64)
    blocks = [entry.block for entry in reader.arena._outstanding]
    assert not any(overlap(one, other) for one in blocks for other in blocks if one is not other)


def test_a_large_value_gets_memory_of_its_own_which_is_closed_when_it_was_read(reader):
    reader.hold(10)
    reader.read = 1
    files = open_files()
    block = reader.hold(KEPT_BYTES + 1)
    assert block.offset == 0 and block.memory.nbytes >= KEPT_BYTES + 1
    del block
    reader.read = 2
    reader.hold(10)
    assert open_files() == files


def test_a_worker_waits_while_too_many_bytes_are_unread(reader, monkeypatch):
    monkeypatch.setattr(arenas, "MAX_OUTSTANDING", 3000)
    reader.hold(1000)
    reader.hold(1000)
    assert reader.waits == 0
    reader.hold(1000)
    assert (reader.waits, reader.read) == (1, 1)
    reader.hold(2900)
    assert reader.read == 3
    assert MAX_OUTSTANDING >= 2 * KEPT_BYTES


def test_a_wait_that_frees_nothing_is_not_repeated(reader, monkeypatch):
    """This worker itself has yet to finish the exchange of the oldest block."""
    monkeypatch.setattr(arenas, "MAX_OUTSTANDING", 3000)
    block = reader.arena.allocate(2000)
    reader.arena.hold(block, lambda: False, lambda: None)
    assert not overlap(reader.arena.allocate(2000), block)


def test_pages_are_taken_when_they_are_needed(reader):
    block = reader.hold(3 << 20)
    assert 3 << 20 <= os.fstat(block.memory.descriptor).st_blocks * 512 < 8 << 20


def test_a_block_that_could_not_be_filled_leaves_nothing_open(reader):
    reader.hold(10)
    files = open_files()
    for _ in range(3):
        reader.arena.allocate(KEPT_BYTES + 1)
    reader.arena.allocate(10)
    assert open_files() == files


def test_a_lack_of_memory_leaves_nothing_open(reader, monkeypatch):
    def refuse(*_):
        raise OSError("No space left on device")

    reader.hold(10)
    files = open_files()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            reader.arena.allocate(KEPT_BYTES + 1)
    monkeypatch.undo()
    reader.hold(10)
    assert open_files() == files


def test_a_closed_arena_leaves_nothing_open():
    files, maps = open_files(), mappings()
    reader = Reader()
    for nbytes in (10, KEPT_BYTES + 1, 10, KEPT_BYTES):
        reader.hold(nbytes)
    reader.arena.close()
    del reader
    assert (open_files(), mappings()) == (files, maps)


@pytest.fixture
def own():
    return os.getpid(), start_mark(os.getpid())


def test_a_peer_sees_what_is_written(own):
    memory = MemoryFile(8192)
    files = open_files()
    seen = map_peer_memory(*own, memory.descriptor, memory.number, 8192)
    memory.data[5000] = 7
    assert seen[5000] == 7
    seen.release()
    del seen
    assert open_files() == files
    memory.close()


def test_a_process_that_has_ended_has_no_memory(own):
    memory = MemoryFile(8192)
    with pytest.raises(OSError, match="has ended"):
        map_peer_memory(own[0], "another start", memory.descriptor, memory.number, 8192)
    memory.close()


def test_memory_is_not_mistaken_for_later_memory_with_the_same_descriptor(own):
    first = MemoryFile(8192)
    descriptor, number = first.descriptor, first.number
    first.close()
    second = MemoryFile(8192)
    assert second.descriptor == descriptor
    with pytest.raises(FileNotFoundError, match="no longer shares"):
        map_peer_memory(*own, descriptor, number, 8192)
    second.close()
