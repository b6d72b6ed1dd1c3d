"""The resident memory of processes, as Linux counts it. Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

RESET_PEAK = "5"  # see proc(5), clear_refs


class PeakMemory:
    """The bytes by which the resident memory of processes grows from now on, at its peak."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._before = {}
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
            self._before[pid] = _read(pid, "VmRSS")

    def largest(self) -> int:
        """Of the process that grew most; those that have ended do not count."""
        grown = []
        for pid, before in self._before.items():
            with contextlib.suppress(FileNotFoundError, KeyError):
                grown.append(_read(pid, "VmHWM") - before)
        return max(grown)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    parents = _parents()
    found = [pid]
    for parent in found:
        found.extend(child for child, its_parent in parents.items() if its_parent == parent)
    return found[1:]


def _parents() -> dict[int, int]:
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    return parents


def _read(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"process {pid} shows no {name}; it may have ended")
