"""`python -m gt.scripts.trace -s 5 --dir traces/`: captures what a running program or server does.

It attaches from outside, writes a trace that Perfetto opens and a log in the columns of the instruction log, and leaves
the program as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gt.core.errors import SettingsError
from gt.core.message_events import WorkerRan
from gt.core.output_files import make_parents
from gt.monitor.activity import Record
from gt.monitor.attachment import RunningProgram, attached, find_program
from gt.monitor.chrome_trace import LOG_SUFFIX, describe_gaps, write_trace
from gt.monitor.monitor_protocol import TraceAnswer, TraceRequest
from gt.monitor.monitor_socket import MAX_LIMIT, MAX_SECONDS
from gt.scripts.command_line import positive_number, run_tool

PATIENCE = 40.0  # seconds, after those of the capture: the program waits 20 for its workers


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gt.scripts.trace", description="Capture what a running GT program does."
    )
    parser.add_argument(
        "-s", "--seconds", type=positive_number, default=5.0, help="how long to capture (default: 5; Ctrl-C ends it)"
    )
    parser.add_argument(
        "-n", "--events", type=int, default=1 << 18, help="the most messages, and commands of each worker (262144)"
    )
    parser.add_argument("--dir", type=Path, default=Path("traces"), help="the directory to write to (default: traces)")
    parser.add_argument("--pid", type=int, help="the program, if several run")
    parser.add_argument("--server", default="", help="a server of this machine, as localhost:12345")
    options = parser.parse_args()
    if options.events < 1:
        parser.error("--events must be positive")
    if options.seconds > MAX_SECONDS:
        parser.error(f"a capture takes at most {MAX_SECONDS:g} seconds")
    return run_tool("gt.scripts.trace", lambda: _trace(options))


def _trace(options: argparse.Namespace) -> int:
    program = find_program(options.pid, options.server)
    require_directory(options.dir)
    print(f"capturing {options.seconds:g} s of process {program.pid}: {program.command}", file=sys.stderr)
    written, gaps = capture(program, options.seconds, options.events, options.dir)
    if gaps:
        print(f"not complete: {gaps}", file=sys.stderr)
    for path in written:
        print(path)
    return 0


def require_directory(directory: Path) -> None:
    """Make the directory of the files, before anything is captured for them. Raises SettingsError if it is none that
    can be written to."""
    try:
        make_parents(directory / LOG_SUFFIX)  # through no link of another user
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise SettingsError(f"traces cannot be written to --dir {directory}: {error}") from None


def capture(program: RunningProgram, seconds: float, events: int, directory: Path) -> tuple[list[Path], str]:
    """Capture a program, until Ctrl-C at most; returns the files that were written, and what is missing in them."""
    records: list[Record] = []
    dropped = 0
    missing: tuple[int, ...] = ()
    with attached(program) as attachment, _first_interrupt(attachment.end_capture):
        for answer in attachment.ask(TraceRequest(seconds, min(events, MAX_LIMIT)), seconds + PATIENCE):
            assert isinstance(answer, TraceAnswer)
            records += answer.records
            dropped, missing = answer.dropped, answer.missing
    stem = f"trace_{program.pid}_{time.strftime('%Y%m%d_%H%M%S')}"
    written = [directory / f"{stem}.json", directory / f"{stem}{LOG_SUFFIX}"]
    for path in written:
        write_trace(path, records, dropped)
    gaps = [describe_gaps(dropped, missing)]
    if not any(isinstance(record, WorkerRan) for record in records):
        gaps.append("no worker began a command: it was idle, or busy with earlier ones; capture for longer (-s)")
    return written, "; ".join(filter(None, gaps))


@contextlib.contextmanager
def _first_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Call a function at the first Ctrl-C; the second one interrupts."""
    before = signal.getsignal(signal.SIGINT)

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        act()

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
