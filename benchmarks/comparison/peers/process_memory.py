"""The resident memory of processes, as Linux counts it. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

RESET_PEAK = "5"  # see proc(5), clear_refs


class PeakMemory:
    """The bytes by which the resident memory of processes grows from now on, at its peak. Processes that have ended do
    not count."""

    def __init__(self, pids: Iterable[int]) -> None:
        found = {pid: _reset_peak(pid) for pid in pids}
        self._before = {pid: size for pid, size in found.items() if size is not None}

    def largest(self) -> int:
        """The growth of the process that grew most."""
        peaks = {pid: _read(pid, "VmHWM") for pid in self._before}
        return max(peak - self._before[pid] for pid, peak in peaks.items() if peak is not None)


def _reset_peak(pid: int) -> int | None:
    """Let the peak of a process begin at its present memory, which is returned; None if it has ended."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _read(pid, "VmRSS")


def _read(pid: int, name: str) -> int | None:
    """The bytes in a line of the status of a process; None if it has ended, also if its parent has not noticed yet."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
