"""The size of the memory of the machine, or of the container that the worker is in."""

from __future__ import annotations

import os
from pathlib import Path

_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_memory() -> int:
    """Bytes of memory; 0 if the system does not tell."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
    return min([total, *filter(None, map(_limit, _CONTAINER_LIMITS))])


def _limit(file: Path) -> int:
    """The limit in a file of a control group; 0 if there is none."""
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
