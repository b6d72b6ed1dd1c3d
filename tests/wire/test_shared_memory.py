"""Shared buffers that carry a tensor between two processes of a machine, in a directory of the test's own."""

import errno
import os
import stat
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gt
from gt.core.errors import ProtocolError
from gt.wire import shared_memory
from gt.wire.process_identity import process_namespace
from tests.subprocesses import ROOT, serving, wait_until


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    return tmp_path


def names(directory):
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize("nbytes", [1, 8, 4095, 4096, 4097, 1 << 20])
def test_a_taken_shared_buffer_has_the_bytes_that_were_written(directory, nbytes):
    content = os.urandom(nbytes)
    name, written = shared_memory.create(nbytes)
    written[:] = content
    assert bytes(shared_memory.take(name, nbytes)) == content


def test_both_ends_see_the_same_memory(directory):
    name, ours = shared_memory.create(8)
    theirs = shared_memory.take(name, 8)
    ours[0], theirs[7] = 1, 2
    assert bytes(ours) == bytes(theirs) == b"\x01\0\0\0\0\0\0\x02"


def test_a_name_is_gone_once_it_is_taken(directory):
    name, _ = shared_memory.create(8)
    assert names(directory) == [name]
    shared_memory.take(name, 8)
    assert names(directory) == []


def test_memory_outlives_the_name(directory):
    name, _ = shared_memory.create(8)
    taken = shared_memory.take(name, 8)
    shared_memory.sweep(os.getpid())
    taken[:] = b"12345678"
    assert bytes(taken) == b"12345678"


def test_only_this_user_can_read_a_shared_buffer(directory):
    name, _ = shared_memory.create(8)
    assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


def test_no_two_shared_buffers_have_the_same_name(directory):
    made = [shared_memory.create(1)[0] for _ in range(20)]
    assert len(set(made)) == 20


def test_a_shared_buffer_is_taken_once(directory):
    name, _ = shared_memory.create(8)
    shared_memory.take(name, 8)
    with pytest.raises(ProtocolError, match=name):
        shared_memory.take(name, 8)


@pytest.mark.parametrize("announced", [0, 7, 9, 1 << 40])
def test_another_size_than_announced_is_refused(directory, announced):
    name, _ = shared_memory.create(8)
    with pytest.raises(ProtocolError, match=f"has 8 bytes, not the {announced} announced"):
        shared_memory.take(name, announced)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../../etc/passwd",
        "gt-1-1-1-../../../etc/passwd",
        "gt-1-1-1-0123456789abcdef/../../etc/passwd",
        "./gt-1-1-1-0123456789abcdef",
        "gt-1-1-1-0123456789abcdef\n",
        "gt-1-1-1-0123456789abcdef\0",
        "gt-1-1-1-0123456789ABCDEF",
        "gt-1-1-1-0123456789abcde",
        "gt--1-1-1-0123456789abcdef",
    ],
)
def test_an_invalid_shared_buffer_name_is_refused(directory, name):
    with pytest.raises(ProtocolError, match="is not the name of a shared buffer"):
        shared_memory.take(name, 8)


@given(st.text() | st.from_regex(shared_memory._NAME))
def test_an_unknown_shared_buffer_name_is_refused(name):
    with pytest.raises(ProtocolError):
        shared_memory.take(name, 8)


def test_a_link_to_another_file_is_refused(directory):
    secret = directory / "secret"
    secret.write_bytes(b"12345678")
    (directory / "gt-1-1-1-0123456789abcdef").symlink_to(secret)
    with pytest.raises(ProtocolError):
        shared_memory.take("gt-1-1-1-0123456789abcdef", 8)
    assert secret.exists()


@pytest.mark.parametrize("nbytes", [8, 4097, 1 << 20])
def test_the_memory_of_a_shared_buffer_is_allocated_before_it_is_written(directory, nbytes):
    name, _ = shared_memory.create(nbytes)
    assert (directory / name).stat().st_blocks * 512 >= nbytes


def test_a_shared_buffer_that_cannot_be_made_leaves_nothing(directory):
    with pytest.raises(OSError, match="Invalid argument"):
        shared_memory.create(0)
    assert names(directory) == []


def test_a_shared_buffer_without_enough_memory_leaves_nothing(directory, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        shared_memory.create(8)
    assert names(directory) == []


def test_a_shared_buffer_that_cannot_be_filled_leaves_nothing(directory):
    with pytest.raises(ZeroDivisionError):
        shared_memory.create(8, lambda data: data[0] // 0)
    assert names(directory) == []


def test_an_empty_shared_buffer_is_refused(directory):
    (directory / "gt-1-1-1-0123456789abcdef").touch()
    with pytest.raises(ProtocolError, match="gt-1-1-1-0123456789abcdef of 0 bytes cannot be mapped"):
        shared_memory.take("gt-1-1-1-0123456789abcdef", 0)


def test_sweep_removes_shared_buffers_that_were_not_taken(directory):
    for _ in range(3):
        shared_memory.create(8)
    shared_memory.sweep(os.getpid())
    assert names(directory) == []


def test_sweep_leaves_shared_buffers_of_other_processes(directory):
    name, _ = shared_memory.create(8)
    shared_memory.sweep(os.getpid() // 10)  # its digits begin ours
    assert names(directory) == [name]


def test_sweep_of_a_process_that_left_nothing(directory):
    shared_memory.sweep(1)
    assert names(directory) == []


def test_sweep_ignores_directories(directory):
    """Every user of the machine may write to the directory."""
    name, _ = shared_memory.create(8)
    (directory / f"gt-{os.getpid()}-x").mkdir()
    (directory / f"gt-{os.getpid()}-1-0-0123456789abcdef").mkdir()
    shared_memory.sweep(os.getpid())
    assert sorted(names(directory)) == [f"gt-{os.getpid()}-1-0-0123456789abcdef", f"gt-{os.getpid()}-x"]


@pytest.fixture
def dead(monkeypatch):
    """A process that has ended."""
    monkeypatch.setattr(shared_memory, "_IS_LOCAL", True)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


def name_of(pid, namespace=None):
    return f"gt-{pid}-{process_namespace() if namespace is None else namespace}-0-0123456789abcdef"


def test_shared_buffers_of_dead_processes_are_swept(directory, dead):
    (directory / name_of(dead)).touch()
    living, _ = shared_memory.create(8)
    shared_memory.sweep_dead()
    assert names(directory) == [living]


def test_shared_buffers_of_other_process_namespaces_are_not_swept(directory, dead):
    (directory / name_of(dead, process_namespace() + 1)).touch()
    (directory / name_of(dead, 0)).touch()
    shared_memory.sweep_dead()
    assert len(names(directory)) == 2


@pytest.mark.parametrize("plant", ["mkdir", "fifo", "symlink", "dangling", "loop", "socket"])
def test_other_files_named_like_shared_buffers_of_dead_processes_are_not_swept(directory, dead, plant):
    path, other = directory / name_of(dead), directory / "other"
    other.touch()
    {
        "mkdir": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "symlink": lambda: path.symlink_to(other),
        "dangling": lambda: path.symlink_to("nowhere"),
        "loop": lambda: path.symlink_to(path),
        "socket": lambda: os.mknod(path, stat.S_IFSOCK | 0o600),
    }[plant]()
    shared_memory.sweep_dead()
    assert sorted(names(directory)) == sorted([path.name, "other"])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_shared_buffers_of_other_users_stay(directory, dead):
    path = directory / name_of(dead)
    path.touch()
    os.chown(path, 65534, 65534)
    shared_memory.sweep_dead()
    assert names(directory) == [path.name]


@pytest.mark.parametrize(("local", "there"), [(False, True), (True, False)])
def test_a_directory_that_is_not_of_this_machine_or_not_there_is_not_swept(directory, dead, monkeypatch, local, there):
    monkeypatch.setattr(shared_memory, "_IS_LOCAL", local)
    (directory / name_of(dead)).touch()
    if not there:
        monkeypatch.setattr(shared_memory, "_DIRECTORY", directory / "missing")
    shared_memory.sweep_dead()
    assert len(names(directory)) == 1


LEAVES = "import os; from gt.wire import shared_memory; shared_memory.create(8); os.kill(os.getpid(), 9)"


@pytest.mark.skipif(not shared_memory._IS_LOCAL or not process_namespace(), reason="there is nothing to sweep")
@pytest.mark.parametrize("who", ["a server", "a session"])
def test_the_next_server_or_program_sweeps_shared_buffers_of_killed_processes(who, fault):
    killed = subprocess.Popen([sys.executable, "-c", LEAVES], cwd=ROOT)
    killed.wait(timeout=60)
    left = [*shared_memory._DIRECTORY.glob(f"gt-{killed.pid}-*")]
    assert len(left) == 1
    if who == "a server":
        with serving():
            wait_until(lambda: not left[0].exists(), what="the removal of the shared buffer")
    else:
        gt.init(workers=1)
        gt.shutdown()
    assert not left[0].exists()
    fault("all processes that know of a shared buffer are killed", "the next server or session of the user removes it")


def test_a_process_that_ends_makes_no_more_shared_buffers(directory, monkeypatch):
    monkeypatch.setattr(shared_memory, "_ended", type(shared_memory._ended)())
    shared_memory.create(8)
    shared_memory.end()
    with pytest.raises(OSError, match="makes no more shared buffers"):
        shared_memory.create(8)
    shared_memory.sweep(os.getpid())
    assert names(directory) == []
