"""Medians of the samples, and ratios to the baseline of the same round."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from benchmarks.comparison.catalog import Workload
from benchmarks.comparison.rounds import Result


@dataclass(frozen=True)
class Cell:
    """A case of a variant: its value in the workload's unit, and its ratio to the baseline if there is one."""

    value: float
    ratio: float | None = None


@dataclass(frozen=True)
class Row:
    label: str
    cells: dict[str, Cell]
    extras: dict[str, float] = field(default_factory=dict)


def find_rows(workload: Workload, results: list[Result]) -> list[Row]:
    """The rows of the variants that ran."""
    baseline = next((each for each in results if each.variant.label == workload.baseline), None)
    return [_row(workload, each, baseline) for each in results if each.rounds]


def _row(workload: Workload, result: Result, baseline: Result | None) -> Row:
    cells = {
        case: Cell(statistics.median(_medians(result, case)) * workload.scale, _ratio(result, baseline, case))
        for case in result.rounds[0]
    }
    titles = [title for case in result.rounds[0].values() for title in case["extras"]]
    return Row(result.variant.label, cells, {title: _extra(result, title) for title in titles})


def _medians(result: Result, case: str) -> list[float]:
    return [statistics.median(round[case]["samples"]) for round in result.rounds if case in round]


def _ratio(result: Result, baseline: Result | None, case: str) -> float | None:
    """The median of the rounds' ratios: a machine that is slower for a while is so for both."""
    if baseline is None or not baseline.rounds or case not in baseline.rounds[0]:
        return None
    pairs = zip(_medians(result, case), _medians(baseline, case), strict=False)
    return statistics.median([ours / theirs for ours, theirs in pairs])


def _extra(result: Result, title: str) -> float:
    return statistics.median(
        [case["extras"][title] for round in result.rounds for case in round.values() if title in case["extras"]]
    )
