"""What a run was measured on."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """`load` is the load of the last minute before the run, by others."""

    processor: str
    cores: int
    memory_gb: float
    system: str
    python: str
    load: float

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cores} cores, {self.memory_gb:.0f} GB, {self.system}, Python {self.python}, "
            f"load {self.load:.1f} before the run"
        )

    @property
    def is_busy(self) -> bool:
        return self.load > self.cores / 4


def describe_machine() -> Machine:
    return Machine(
        _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown processor",
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        int(_field("/proc/meminfo", "MemTotal").split()[0] or 0) / 1e6 if Path("/proc/meminfo").exists() else 0,
        f"{platform.system()} {platform.machine()}",
        sys.version.split()[0],
        os.getloadavg()[0],
    )


def _field(path: str, name: str) -> str:
    """The value of a line `name : value`; empty if there is none."""
    if Path(path).exists():
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
