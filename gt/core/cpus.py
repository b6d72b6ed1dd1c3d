"""The CPUs that this process may use, which may be fewer than those of the machine."""

from __future__ import annotations

import os
from pathlib import Path

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
