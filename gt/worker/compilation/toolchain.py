"""The C++ compiler of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

COMPILERS = ("g++", "clang++")


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """The C++ compiler of this machine: that of the variable CXX, or the first one of COMPILERS."""
    names = (environ["CXX"].split()[0],) if environ.get("CXX", "").strip() else COMPILERS
    return next((name for name in names if shutil.which(name, path=environ.get("PATH"))), None)
