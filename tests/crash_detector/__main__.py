"""`python -m tests.crash_detector [op pattern ...]`: try the ops of aten, and print the ends of processes."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
import time
from pathlib import Path

import torch

from gt.worker.engines import PyTorchEngine
from tests.crash_detector import fence
from tests.crash_detector.random_arguments import draw_calls
from tests.crash_detector.recording import all_ops, record_calls
from tests.crash_detector.trials import Trials, worker_functions


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_detector", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="ops, such as 'aten._ctc_loss*'; all by default")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a file to which each end is written, one per line")
    parser.add_argument("--no-fence", action="store_true", help="do not guard the results of ops, only their arguments")
    options = parser.parse_args()
    if not options.no_fence and not fence.is_loaded():
        with tempfile.TemporaryDirectory() as directory:
            return fence.restart_with_fence(directory, sys.argv[1:])
    return detect(options)


def detect(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # threads do not survive a fork
    started = time.monotonic()
    recorded = record_calls()
    ops = [op for op in all_ops("aten") if _is_chosen(op, options.patterns)]
    calls = {op: recorded.get(op) or draw_calls(op) for op in ops}
    print(f"{len(ops)} ops, {sum(op in recorded for op in ops)} of them recorded, {time.monotonic() - started:.0f} s")
    found = set()
    trials = Trials(calls, worker_functions(PyTorchEngine("cpu", threads=1)), options.jobs)
    log = options.json.open("w") if options.json else None
    for end in trials.run(ops):
        print(f"{end.op}: {end.signal}: {end.change}: {end.arguments[:200]}", flush=True)
        if log is not None:
            print(end.json(), file=log, flush=True)
        if end.is_a_crash:
            found.add(end.op)
    print(f"{len(found)} ops ended their process, after {time.monotonic() - started:.0f} s")
    return 1 if found else 0


def _is_chosen(op: str, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(op, pattern) for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())
