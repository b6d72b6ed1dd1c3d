"""How much memory the values of a program take together, at the moments when they take the most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gt.sharding.optimizer.pairwise_model import Costs
from gt.sharding.optimizer.recorded_program import STATE, RecordedProgram
from gt.sharding.optimizer.update_groups import UpdateGroups

MOMENTS = 3  # at most, for which there is a limit


def memory_rows(
    program: RecordedProgram,
    groups: UpdateGroups,
    nbytes: Mapping[str, tuple[int, Costs]],
    sizes: Sequence[int],
) -> tuple[Costs, ...]:
    """Per variable, (moments, choices): the bytes of a worker that its choices take at the chosen moments. `nbytes` are
    the variable of each value and the bytes of its choices, `sizes` the numbers of choices."""
    spans = lifetimes(program, groups)
    moments = _fullest_moments(program, spans)
    rows = [np.zeros((len(moments), size)) for size in sizes]
    for value, (first, last) in spans.items():
        variable, own = nbytes.get(groups.of_value.get(value, value), (-1, np.zeros(0)))
        if variable < 0:
            continue
        for row, moment in enumerate(moments):
            if first <= moment <= last:
                rows[variable][row] += own
    return tuple(rows)


def lifetimes(program: RecordedProgram, groups: UpdateGroups) -> dict[str, tuple[int, int]]:
    """The numbers of the first and the last op during which each value with memory of its own exists. What exists
    before the step exists all the time. A view lives in its base, and so do values that are written in place."""
    end = len(program.ops)
    home: dict[str, str] = {}
    spans: dict[str, list[int]] = {}
    for number, op in enumerate(program.ops):
        for value in (*op.inputs, *filter(None, op.written)):  # an argument out= is written only
            base = home.setdefault(value, value)
            spans.setdefault(base, [-1, end])
            if spans[base][0] >= 0:
                spans[base][1] = number
        for output, value in enumerate(op.outputs):
            base = op.inputs[0] if op.is_view else op.written[output]
            home[value] = home.get(base, base) if base else value
            if home[value] == value:
                spans[value] = [number, number]
            elif spans[home[value]][0] >= 0:
                spans[home[value]][1] = number
    for value in program.names:
        spans.setdefault(value, [-1, end])
    states = {value for value in groups.of_value if program.roles[value] == STATE and value not in spans}
    return {value: (first, last) for value, (first, last) in spans.items()} | dict.fromkeys(states, (-1, end))


def _fullest_moments(program: RecordedProgram, spans: Mapping[str, tuple[int, int]]) -> list[int]:
    """The ops at which whole values take the most memory: over all, and in the parts before and after."""
    held = np.zeros(len(program.ops) + 2)
    for value, (first, last) in spans.items():
        held[max(first, 0)] += program.values[value].nbytes
        held[last + 1] -= program.values[value].nbytes
    held = np.cumsum(held)[: len(program.ops)]
    if not len(held):
        return []
    chosen = [int(held.argmax())]
    updates = [number for number, op in enumerate(program.ops) if op.in_update]
    if updates:
        chosen.append(max(updates, key=lambda number: held[number]))
    chosen.append(len(program.ops) - 1)
    return list(dict.fromkeys(chosen))[:MOMENTS]
