"""Errors name a remedy where the home, TMPDIR or shared memory is missing or cannot be written."""

import contextlib
import os
from pathlib import Path

import pytest

from gt.core.messages import ByteRange, CreateTensor
from gt.wire import shared_memory
from gt.wire.payloads import Payloads
from tests.records import meta, own
from tests.subprocesses import find_port, finish, running, server_keys, start

NO_HOME = """
import os, pwd, runpy, sys
def nobody(_):
    raise KeyError("no entry")
pwd.getpwuid = nobody
for name in ("HOME", "GT_KEYS"):
    os.environ.pop(name, None)
"""
SERVES = "sys.argv[1:] = ['-p', sys.argv[1]]; runpy.run_module('gt.{}', run_name='__main__')"
CONNECTS = "import gt; gt.connect('localhost:' + sys.argv[1])"
LOCAL = "import gt; gt.init(workers=1); print(gt.ones(3).sum().item()); gt.shutdown()"


@pytest.mark.parametrize("what", [SERVES.format("server"), SERVES.format("worker"), CONNECTS])
def test_the_error_of_a_user_without_a_home_names_gt_keys(what):
    code, _, err = finish(start("-c", NO_HOME + what, "12345"))  # it ends before it uses the port
    last = err.strip().splitlines()[-1]
    assert code == 1 and "HOME is not set" in last and "set GT_KEYS to a directory of your own" in last


def test_workers_of_a_program_need_no_home():
    code, out, err = finish(start("-c", NO_HOME + LOCAL))
    assert (code, out) == (0, "3.0\n"), err


@pytest.mark.parametrize("home", ["/proc", "a file"])
def test_a_home_that_cannot_be_written_is_an_error(home, tmp_path):
    (tmp_path / "a file").touch()
    process = start("-m", "gt.server", "-p", "0", HOME=str(tmp_path / home), GT_KEYS="")
    code, _, err = finish(process)
    assert code == 1 and "keys cannot be written" in err and "set GT_KEYS to a directory of your own" in err


NO_ROOM = """
import tempfile
tempfile.tempdir = {!r}
import gt
try:
    gt.init(workers=1)
except gt.SettingsError as error:
    print(error)
"""


@pytest.mark.parametrize("directory", ["/proc", "missing"])
def test_an_unusable_directory_for_temporary_files_is_an_error(directory, tmp_path):
    code, out, err = finish(start("-c", NO_ROOM.format(str(tmp_path / directory))))
    assert code == 0 and "set TMPDIR to a directory that exists" in out, err


NOWHERE = """
import os, tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc"]
import pathlib
real = pathlib.Path.is_dir
pathlib.Path.is_dir = lambda self: str(self) != "/dev/shm" and real(self)
import gt
print(gt.ones(3).sum().item())
try:
    gt.shutdown()
    gt.init(workers=1)
except gt.SettingsError as error:
    print(error)
"""


def test_a_missing_directory_is_an_error_where_one_is_needed():
    code, out, err = finish(start("-c", NOWHERE))
    first, second = out.splitlines()
    assert code == 0 and first == "3.0" and "No usable temporary directory" in second and "set TMPDIR" in second, err


@pytest.mark.parametrize("directory", ["/proc", "/nowhere"])
def test_without_shared_memory_that_can_be_written_bytes_go_with_the_messages(monkeypatch, directory):
    monkeypatch.setattr(shared_memory, "_DIRECTORY", Path(directory))
    large = meta(1 << 20)
    created = CreateTensor(own(1), large, ByteRange("", large.nbytes), None, 0)
    content = bytes(large.nbytes)
    assert Payloads(lambda *_: None).pack([created], [content]) == ([created], [[content]])
    shared_memory.sweep(os.getpid())
    shared_memory.sweep_dead()


WITHOUT = """
import pathlib
from gt.wire import shared_memory
shared_memory._DIRECTORY = pathlib.Path("/proc")
"""


def test_programs_without_shared_memory_that_can_be_written_work():
    server = start("-c", "import runpy, sys" + WITHOUT + SERVES.format("server"), "0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(server))
        port = str(find_port(server, server_keys()))
        worker = start("-c", "import runpy, sys" + WITHOUT + SERVES.format("worker"), port)
        stack.enter_context(running(worker))
        program = WITHOUT + CONNECTS.replace("sys.argv[1]", repr(port))
        program += "\nprint((gt.to(__import__('torch').ones(1 << 18)) + 1).cpu().sum().item()); gt.shutdown()"
        code, out, err = finish(start("-c", program))
        assert (code, out) == (0, f"{float(2 << 18)}\n"), err
