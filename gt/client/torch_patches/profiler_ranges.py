"""The starts and ends of torch's profilers, and named ranges in what they record."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch.autograd import profiler


@contextmanager
def profiler_range(name: str) -> Generator[None]:
    """A context that a profiler records under a name."""
    begun = torch.autograd._record_function_with_args_enter(name)
    try:
        yield
    finally:
        torch.autograd._record_function_with_args_exit(begun)


def follow_profilers(note: Callable[[bool], None]) -> None:
    """Call `note` with True when a profiler of this process starts, and with False when it stops."""
    start, stop = profiler._run_on_profiler_start, profiler._run_on_profiler_stop

    def run_on_start() -> None:
        start()
        note(True)

    def run_on_stop() -> None:
        note(False)
        stop()

    profiler._run_on_profiler_start = run_on_start
    profiler._run_on_profiler_stop = run_on_stop
