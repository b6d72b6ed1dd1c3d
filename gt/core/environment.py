"""The environment of this process: the CPUs that it may use, the Python of its subprocesses, and optional packages."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from gt.core.errors import SettingsError

_GROUPS = Path("/sys/fs/cgroup")  # the control groups; inside a container, those of the container


def usable_cpus(groups: Path = _GROUPS) -> int:
    """The CPUs that the affinity of this process names, at most those that the quota of its container allows."""
    named = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(named, int(_quota(groups))))


def _quota(groups: Path) -> float:
    """The number of CPUs whose time a container may use; a large number if there is no limit."""
    text = _read(groups / "cpu.max")  # such as "150000 100000", or "max 100000"
    if not text:
        text = f"{_read(groups / 'cpu' / 'cpu.cfs_quota_us')} {_read(groups / 'cpu' / 'cpu.cfs_period_us')}"
    try:
        quota, period = map(int, text.split())
    except ValueError:
        return 1 << 20
    return quota / period if quota > 0 and period > 0 else 1 << 20


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def load_extra(module: str, extra: str, purpose: str) -> Any:
    """A module of an extra. Raises SettingsError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise SettingsError(f"{purpose} needs {package}: pip install 'gt-tensor[{extra}]'") from None


# -P leaves out the current directory; the variable says the same to the interpreters that torchrun or srun starts.
PYTHON = (sys.executable, "-P")
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def import_environment() -> dict[str, str]:
    """The variables by which an interpreter imports from the places of this process, in the same order. "" is a place
    of a process that was started in its current directory."""
    places = [os.path.abspath(place) for place in sys.path if isinstance(place, str)]
    expressible = [place for place in dict.fromkeys(places) if os.pathsep not in place]
    return {**SAFE_PATH, "PYTHONPATH": os.pathsep.join(expressible)}
