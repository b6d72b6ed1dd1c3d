"""Whether a process is still there."""

from __future__ import annotations

import os

from gt.wire.liveness import is_running, start_mark
from tests.subprocesses import finish, start

OUT_OF_FILES = """
import os, resource
from gt.wire.liveness import is_running, start_mark
parent = os.getppid()
mark = start_mark(parent)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = []
try:
    while True:
        files.append(open(os.devnull))
except OSError:
    print(is_running(parent, mark))
"""


def test_a_process_without_a_free_file_takes_nobody_for_dead():
    assert finish(start("-c", OUT_OF_FILES))[:2] == (0, "True\n")


def test_a_process_is_known_by_its_start():
    assert is_running(os.getpid(), start_mark(os.getpid()))
    assert not is_running(os.getpid(), "another start")
