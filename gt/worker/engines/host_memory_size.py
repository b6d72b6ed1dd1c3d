"""The size of the memory of the machine, or of the container that the worker is in."""

from __future__ import annotations

import os
from pathlib import Path

_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_CONTAINER_LIMITS = (_V2 / "memory.max", _V1 / "memory.limit_in_bytes")
_CONTAINER_USES = (_V2 / "memory.current", _V1 / "memory.usage_in_bytes")
_CONTAINER_STATS = (_V2 / "memory.stat", _V1 / "memory.stat")
_CACHED = ("inactive_file ", "total_inactive_file ")  # a container's memory that the system takes back when needed


def host_memory() -> int:
    """Bytes of memory; 0 if the system does not tell."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
    return min([total, *filter(None, map(_limit, _CONTAINER_LIMITS))])


def available_memory() -> int | None:
    """Bytes of memory that can be taken now without taking from others; None if the system does not tell."""
    try:
        with open("/proc/meminfo", "rb") as file:
            text = file.read(1024)
        found = [int(text.split(b"MemAvailable:")[1].split(None, 1)[0]) << 10]
    except (OSError, IndexError, ValueError):
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, use, stats in zip(_CONTAINER_LIMITS, _CONTAINER_USES, _CONTAINER_STATS, strict=True):
        if 0 < (most := _limit(limit)) < total:
            found.append(most - _limit(use) + _cached(stats))
    return min(found)


def _cached(file: Path) -> int:
    """The bytes of a control group that are a cache of files."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return max([int(line.split()[1]) for line in lines if line.startswith(_CACHED)], default=0)


def _limit(file: Path) -> int:
    """The limit in a file of a control group; 0 if there is none."""
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
