"""The preloaded library of `fence.c`, which puts guard pages around the results of ops too; it needs a C compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).with_name("fence.c")


def is_loaded() -> bool:
    return hasattr(ctypes.CDLL(None), "fence_start")


def start() -> None:
    """From now on the memory that this process allocates for tensors is fenced, if the library is loaded."""
    if is_loaded():
        ctypes.CDLL(None).fence_start()


def restart_with_fence(directory: str, arguments: list[str]) -> int:
    """This program again, with the library loaded; gives its exit status."""
    library = Path(directory) / "fence.so"
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler `cc` for tests/crash_detector/fence.c; install one, or use --no-fence")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
    command = [sys.executable, "-m", "tests.crash_detector", *arguments]
    return subprocess.run(command, env=os.environ | {"LD_PRELOAD": str(library)}, check=False).returncode
