"""`python -m gt.scripts.trace -s 5 --dir traces/`: captures what a running program or server does.

It attaches from outside, writes a trace that Perfetto opens and a log in the columns of the instruction log, and leaves
the program as it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gt.core.errors import GTError
from gt.monitor.attachment import RunningProgram, ask, find_program
from gt.monitor.monitor_protocol import TraceAnswer, TraceRequest
from gt.monitor.records import Record
from gt.monitor.trace_files import LOG_SUFFIX, describe_gaps, write_trace


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gt.scripts.trace", description="Capture what a running GT program does."
    )
    parser.add_argument("-s", "--seconds", type=float, default=5.0, help="how long to capture (default: 5)")
    parser.add_argument(
        "-n", "--events", type=int, default=1 << 18, help="the most messages, and commands of each worker (262144)"
    )
    parser.add_argument("--dir", type=Path, default=Path("traces"), help="the directory to write to (default: traces)")
    parser.add_argument("--pid", type=int, help="the program, if several run")
    parser.add_argument("--server", default="", help="a server of this machine, as localhost:12345")
    options = parser.parse_args()
    if options.seconds <= 0 or options.events < 1:
        parser.error("--seconds and --events must be positive")
    try:
        program = find_program(options.pid, options.server)
        print(f"capturing {options.seconds:g} s of process {program.pid}: {program.command}", file=sys.stderr)
        written, gaps = capture(program, options.seconds, options.events, options.dir)
    except GTError as error:
        print(f"gt.scripts.trace: {error}", file=sys.stderr)
        return 1
    if gaps:
        print(f"not complete: {gaps}", file=sys.stderr)
    for path in written:
        print(path)
    return 0


def capture(program: RunningProgram, seconds: float, events: int, directory: Path) -> tuple[list[Path], str]:
    """Capture a program; returns the files that were written, and what is missing in them."""
    records: list[Record] = []
    dropped = 0
    missing: tuple[int, ...] = ()
    for answer in ask(program, TraceRequest(seconds, events)):
        assert isinstance(answer, TraceAnswer)
        records += answer.records
        dropped, missing = answer.dropped, answer.missing
    stem = f"trace_{program.pid}_{time.strftime('%Y%m%d_%H%M%S')}"
    written = [directory / f"{stem}.json", directory / f"{stem}{LOG_SUFFIX}"]
    for path in written:
        write_trace(path, records, dropped)
    return written, describe_gaps(dropped, missing)


if __name__ == "__main__":
    sys.exit(main())
