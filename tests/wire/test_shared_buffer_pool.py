"""The shared memory of a session: used again, limited, and removed with the session."""

import os
import stat

import pytest

from gt.core.errors import ProtocolError
from gt.core.messages import ByteRange
from gt.wire import payloads, shared_memory
from gt.wire.payloads import SharedBufferPool
from gt.wire.shared_memory import AttachedBuffers, is_made_with

SIZE = 1 << 18


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    return tmp_path


@pytest.fixture
def pool(directory):
    pool = SharedBufferPool("secret")
    yield pool
    pool.close()
    assert names(directory) == set()


def names(directory):
    return {path.name for path in directory.iterdir()}


def reserve(pool, ident, nbytes=SIZE):
    return pool.reserve(ident, nbytes)[0].name


def test_a_released_shared_buffer_is_used_again(pool):
    first, second = reserve(pool, 1), reserve(pool, 2)
    assert first != second
    pool.release(1)
    assert reserve(pool, 3) == first


def test_a_shared_buffer_has_a_private_mode_and_a_sealed_name(pool, directory):
    name = reserve(pool, 1)
    assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    assert is_made_with(name, "secret") and not is_made_with(name, "another")


def test_a_shared_buffer_serves_tensors_of_about_its_size(pool):
    name = reserve(pool, 1)
    pool.release(1)
    assert reserve(pool, 2, 50 * SIZE) != name
    assert reserve(pool, 3, SIZE // 3) == name


def test_a_discarded_shared_buffer_is_not_used_again(pool, directory):
    name = reserve(pool, 1)
    pool.discard(1)
    assert names(directory) == set()
    assert reserve(pool, 2) != name


def test_the_least_recently_used_makes_room(pool, directory, monkeypatch):
    monkeypatch.setattr(payloads, "MAX_KEPT", 3 * SIZE)
    first, second = reserve(pool, 1), reserve(pool, 2)
    pool.release(2)
    pool.release(1)
    large = reserve(pool, 3, 2 * SIZE)
    assert names(directory) == {first, large} and second not in names(directory)


def test_more_than_the_limit_is_not_kept(pool, directory, monkeypatch):
    monkeypatch.setattr(payloads, "MAX_KEPT", 2 * SIZE)
    made = [reserve(pool, ident) for ident in range(4)]
    assert names(directory) == set(made)
    for ident in range(4):
        pool.release(ident)
    assert len(names(directory)) <= 2


def test_a_read_is_in_use_until_its_bytes_are_garbage(pool):
    byte_range, data = pool.reserve(1, SIZE)
    data[:4] = b"abcd"
    left, right = pool.parts(1, [ByteRange(byte_range.name, 2), ByteRange(byte_range.name, 2, 2)])
    assert (bytes(left), bytes(right)) == (b"ab", b"cd")
    del left
    assert reserve(pool, 2) != byte_range.name
    del right
    assert reserve(pool, 3) == byte_range.name


@pytest.mark.parametrize("wrong", [ByteRange("gt-1-1-1-0123456789abcdef", 4), ByteRange("", SIZE, 1 << 20)])
def test_parts_outside_the_shared_buffer_are_refused(pool, wrong):
    byte_range, _ = pool.reserve(1, SIZE)
    with pytest.raises(ProtocolError, match="was not given for request"):
        pool.parts(1, [ByteRange(wrong.name or byte_range.name, wrong.nbytes, wrong.offset)])


def test_an_id_without_a_shared_buffer_is_ignored(pool):
    pool.release(7)
    pool.discard(7)


# The other end


def test_a_worker_sees_what_the_client_writes_and_keeps_the_mapping(pool, directory):
    byte_range, data = pool.reserve(1, SIZE)
    attached = AttachedBuffers()
    data[10:14] = b"abcd"
    assert bytes(attached.view(byte_range.name, 10, 4)) == b"abcd"
    pool.discard(1)
    attached.view(byte_range.name, 0, 4)[:] = b"efgh"
    assert bytes(data[:4]) == b"efgh"


def test_mappings_of_removed_shared_buffers_are_dropped(pool):
    attached = AttachedBuffers()
    attached.view(reserve(pool, 1), 0, 1)
    pool.discard(1)
    attached.view(reserve(pool, 2), 0, 1)
    assert len(attached._mapped) == 1


@pytest.mark.parametrize(("offset", "nbytes"), [(0, SIZE + 1), (SIZE, 1), (1 << 40, 1)])
def test_bytes_outside_a_shared_buffer_are_refused(pool, offset, nbytes):
    with pytest.raises(ProtocolError, match="were announced"):
        AttachedBuffers().view(reserve(pool, 1), offset, nbytes)


@pytest.mark.parametrize("name", ["/etc/passwd", "gt-1-1-1-0123456789abcdef", "gt-1-1-1-../../../etc/passwd"])
def test_other_files_are_refused(directory, name):
    with pytest.raises(ProtocolError):
        AttachedBuffers().view(name, 0, 1)


def test_a_file_without_pages_gets_them_before_it_is_written(directory):
    """A write to a page that the file system has no room for would kill the worker."""
    path = directory / "gt-1-1-1-0123456789abcdef"
    path.touch()
    os.truncate(path, 1 << 16)
    AttachedBuffers().view(path.name, 0, 1)
    assert path.stat().st_blocks * 512 >= 1 << 16
    path.unlink()
