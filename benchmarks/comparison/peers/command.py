"""The command line of a peer's program, the timing of its steps, and the JSON that it prints.

Imported in every environment: standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

BUDGET_SECONDS, QUICK_BUDGET_SECONDS = 1.0, 0.3
MIN_SAMPLES, MAX_SAMPLES = 3, 100


@dataclass(frozen=True)
class Request:
    """One run of a peer: a workload, the number of workers (0: none of their own), and the way that it is done."""

    workload: str
    workers: int
    way: str
    quick: bool

    @property
    def budget(self) -> float:
        return QUICK_BUDGET_SECONDS if self.quick else BUDGET_SECONDS


@dataclass
class Case:
    """The samples of one column of a workload, in seconds or in bytes, and further figures by their titles."""

    samples: list[float]
    extras: dict[str, float] = field(default_factory=dict)


Cases = dict[str, Case]
Measure = Callable[[Request], Cases]


def read_request() -> Request:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--way", default="")
    parser.add_argument("--quick", action="store_true")
    return Request(**vars(parser.parse_args()))


def run_peer(measures: dict[str, Measure], versions: dict[str, str]) -> None:
    """Measure what the command line asks for, and print it as the last line of stdout."""
    request = read_request()
    report(measures[request.workload](request), versions)


def report(cases: Cases, versions: dict[str, str]) -> None:
    found = {name: asdict(case) for name, case in cases.items()}
    print(json.dumps({"cases": found, "versions": versions}), flush=True)


def sample(
    step: Callable[[], object], budget: float, *, parts: int = 1, agree: Callable[[int], int] = lambda count: count
) -> list[float]:
    """Seconds for a part of a step, which is called until the budget is used. `agree` gives all processes that take
    part in the steps the same number."""
    step()
    step()
    start = time.perf_counter()
    step()
    once = time.perf_counter() - start
    count = agree(min(MAX_SAMPLES, max(MIN_SAMPLES, int(budget / once))))
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) / parts)
    return samples


def sample_programs(program: str, repeats: int, environment: dict[str, str] | None = None) -> list[float]:
    """Seconds from the start of a Python program to its first printed line. The first run, which may compile modules,
    is left out."""
    command = [sys.executable, "-c", program]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    samples = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables | (environment or {})) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            samples.append(time.perf_counter() - start)
        if process.returncode or not line:
            raise RuntimeError(f"the program ended with code {process.returncode}, after it had printed {line!r}")
    return samples[1:]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
