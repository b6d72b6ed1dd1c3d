"""Reports of tasks as a table for people and as JSON."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from tests.conformance.expected import unexpected
from tests.conformance.opdb import Failure, TaskReport

_LISTED_OPS = 40


def render(reports: Sequence[TaskReport], stale: Sequence[str]) -> str:
    failures = unexpected(reports)
    sections = [_failure_table(failures), _cause_table(failures), "\n".join(stale), _totals(reports, failures)]
    return "\n\n".join(section for section in sections if section)


def _failure_table(failures: Sequence[Failure]) -> str:
    """One line for each op, variant and dtype: the first failing sample stands for the rest."""
    groups: dict[tuple[str, str, str], list[Failure]] = defaultdict(list)
    for failure in failures:
        groups[failure.op, failure.variant, failure.dtype].append(failure)
    rows = [("op", "variant", "dtype", "failed", "sample", "reason")]
    for key, group in sorted(groups.items()):
        rows.append((*key, str(len(group)), str(group[0].sample), f"{group[0].reason}  <- {group[0].arguments}"))
    return _align(rows) if groups else ""


def _cause_table(failures: Sequence[Failure]) -> str:
    """Failures with the same reason but for numbers, most frequent first."""
    groups: dict[str, list[Failure]] = defaultdict(list)
    for failure in failures:
        groups[_cause(failure.reason)].append(failure)
    rows = [("ops", "failed", "cause")]
    for cause, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        ops = sorted({failure.op for failure in group})
        names = ", ".join(ops[:_LISTED_OPS]) + (", ..." if len(ops) > _LISTED_OPS else "")
        rows.append((str(len(ops)), str(len(group)), f"{cause}  <- {names}"))
    return _align(rows) if groups else ""


def _cause(reason: str) -> str:
    """The reason without what differs between samples of the same bug."""
    reason = re.sub(
        r" gave \[.*? where torch's shape function said .*?(\[op:|$)", r" gave other metas than torch's \1", reason
    )
    reason = re.sub(r"op: (\S+?)\(.*?\) on worker", r"op: \1 on worker", reason)
    reason = re.sub(r"values: .*", "values", reason)
    return re.sub(r"\b\d+(\.\d+)?(, \d+)*", "N", reason)


def _totals(reports: Sequence[TaskReport], failures: Sequence[Failure]) -> str:
    rows: list[tuple[str, ...]] = [
        ("dtype", "ops", "ops failed", "samples", "passed", "both raise", "failed", "expected", "cpu s")
    ]
    dtypes = list(dict.fromkeys(report.task.dtype for report in reports))
    for dtype in [*dtypes, "all"]:
        chosen = [report for report in reports if dtype in (report.task.dtype, "all")]
        bad = [failure for failure in failures if dtype in (failure.dtype, "all")]
        rows.append((dtype, *map(str, _sums(chosen, bad))))
    return _align(rows)


def _sums(reports: Sequence[TaskReport], failures: Sequence[Failure]) -> tuple[int, ...]:
    all_failures = sum(len(report.failures) for report in reports)
    return (
        len({report.task.op for report in reports}),
        len({failure.op for failure in failures}),
        sum(report.samples for report in reports),
        sum(report.passed for report in reports),
        sum(len(report.both_raise) for report in reports),
        len(failures),
        all_failures - len(failures),
        round(sum(report.seconds for report in reports)),
    )


def _align(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)


def as_json(reports: Sequence[TaskReport]) -> str:
    return json.dumps([asdict(report) for report in reports], indent=1)
