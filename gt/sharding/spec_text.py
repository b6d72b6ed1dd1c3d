"""Parses specs and constraints from the text that `str()` gives: per dim the axes that cut it or '-', then '+' and the
partial axes; and describes layouts for people."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gt.core.errors import LayoutError
from gt.sharding.boxes import Cuts
from gt.sharding.constraints import Constraint, DimConstraint
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec


def _split(text: str) -> tuple[list[str], tuple[str, ...], str]:
    """The dims of a spec's text, its partial axes and their reduction."""
    body, plus, tail = text.partition("+")
    axes, _, kind = tail.partition(":")
    if ":" in kind:
        raise LayoutError(
            f"{text!r} names several reductions; a tensor is partial by one kind along all its partial axes: "
            f"write it once at the end, as in '- + dp tp:max'"
        )
    if plus and not axes.split():
        raise LayoutError(f"{text!r} names no axis after '+'; write for example 'dp, - + tp' or 'dp, - + tp:max'")
    dims = [dim.strip() for dim in body.split(",")] if body.strip() else []
    return dims, tuple(axes.split()), kind.strip() or "sum"


_DIM = re.compile(r"(?P<axes>-|[A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*)\s*(?:\[(?P<cuts>[\d:\s]*)\])?\Z")
_CONSTRAINT_DIM = re.compile(r"(?P<axes>-|[A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*)\s*(?P<open>\?)?(?:@(?P<priority>\d+))?\Z")


def parse_spec(text: str, mesh: DeviceMesh) -> ShardingSpec:
    """A spec from its text: per dim its axes or '-', then '+' and the partial axes: `"dp, - + tp"`."""
    dims, partial, kind = _split(text)
    found = [_match(_DIM, dim, text, "axis names or '-'") for dim in dims]
    cuts = [_parse_cuts(match["cuts"]) for match in found]
    return ShardingSpec(mesh, [_parse_axes(match["axes"]) for match in found], partial, kind, cuts)


def describe_spec(spec: ShardingSpec) -> str:
    """A layout in a few words: `worker 0`, `replicated on 0-3` or `[dp, -] on 0-3`."""
    return f"[{spec}] on {join_numbers(spec.mesh.workers)}" if not spec.is_whole else describe_whole(spec.mesh.workers)


def describe_whole(workers: Iterable[int]) -> str:
    """The layout of a tensor that each of these workers holds whole."""
    held = tuple(workers)
    return f"worker {held[0]}" if len(held) == 1 else f"replicated on {join_numbers(held)}"


def join_numbers(numbers: Iterable[int]) -> str:
    """Numbers in order, with ranges for those that follow each other: `0-3, 7`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, each)) for each in ranges)


def parse_constraint(text: str, mesh: DeviceMesh) -> Constraint:
    """A constraint from its text: that of a spec, with '?' after a dim that may be cut further and '@1' for a priority:
    `"dp, tp?@1"`."""
    dims, partial, kind = _split(text)
    found = [
        _match(_CONSTRAINT_DIM, dim, text, "axis names or '-', then '?' if open, then '@' and a priority")
        for dim in dims
    ]
    spec = ShardingSpec(mesh, [_parse_axes(match["axes"]) for match in found], partial, kind)  # checks the axes
    parsed = [DimConstraint(_parse_axes(m["axes"]), m["open"] is not None, int(m["priority"] or 0)) for m in found]
    return Constraint(mesh, tuple(parsed), spec.partial, spec.kind)


def _match(pattern: re.Pattern[str], dim: str, text: str, expected: str) -> re.Match[str]:
    match = pattern.match(dim)
    if match is None:
        raise LayoutError(f"{dim!r} in {text!r} is not a dim of a spec: expected {expected}")
    return match


def _parse_axes(text: str) -> DimSpec:
    return () if text == "-" else tuple(text.split())


def _parse_cuts(text: str | None) -> Cuts | None:
    if text is None:
        return None
    pairs = [pair.split(":") for pair in text.split()]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise LayoutError(f"[{text}] is not a list of intervals such as [0:3 3:4]")
    return tuple([(int(start), int(stop)) for start, stop in pairs])
