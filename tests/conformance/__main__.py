"""`python -m tests.conformance`: run torch's op database on GT. The table goes to stdout, progress to stderr."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.expected import stale_entries, unexpected
from tests.conformance.formats import FORMATS
from tests.conformance.opdb import DTYPES, Task, TaskReport, dtypes_of, select_ops
from tests.conformance.pool import Pool
from tests.conformance.report import as_json, render
from tests.conformance.sides import MODES


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        ops = select_ops(options.op)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    wanted = [(op, dtype) for op in ops for dtype in dtypes_of(op) if not options.dtype or dtype in options.dtype]
    formats = list(FORMATS) if options.formats else [""]
    tasks = [
        Task(op, dtype, options.samples, format=format_, masks=options.masks, tangents=options.tangents)
        for op, dtype in wanted
        for format_ in formats
    ]
    reports = _run(tasks, options.jobs, options.mode)
    is_part = options.samples or options.dtype or options.formats or options.masks or options.tangents
    stale = [] if is_part else stale_entries(reports)
    print(render(reports, stale))
    if options.json:
        Path(options.json).write_text(as_json(reports))
    return 1 if unexpected(reports) or stale else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--op", action="append", default=[], metavar="NAME", help="an op or a glob; may be repeated")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be repeated; all without it")
    parser.add_argument("--samples", type=int, metavar="N", help="at most so many of each op and dtype")
    parser.add_argument("--formats", action="store_true", help="operands in memory formats instead of contiguous")
    parser.add_argument("--masks", action="store_true", help="gradients by some of the inputs only")
    parser.add_argument("--tangents", action="store_true", help="derivatives of forward mode only")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--json", metavar="FILE", help="write all reports here")
    parser.add_argument(
        "--mode", choices=list(MODES), default="embedded", help="one in-process worker, two, or cut over several"
    )
    return parser


def _run(tasks: Sequence[Task], jobs: int, mode: str) -> list[TaskReport]:
    order = {task: place for place, task in enumerate(tasks)}
    start = time.monotonic()
    reports: list[TaskReport] = []
    with Pool(min(jobs, max(1, len(tasks))), mode) as pool:
        for report in pool.run(tasks):
            reports.append(report)
            _tell(report, len(reports), len(tasks), time.monotonic() - start)
    return sorted(reports, key=lambda report: order[report.task])


def _tell(report: TaskReport, done: int, total: int, seconds: float) -> None:
    bad = f" {len(report.failures)} failed" if report.failures else ""
    task = " ".join(filter(None, (report.task.op, report.task.dtype, report.task.format)))
    print(f"[{done}/{total} {seconds:.0f} s] {task} {report.seconds:.1f} s{bad}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
