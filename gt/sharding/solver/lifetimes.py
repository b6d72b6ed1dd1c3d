"""How much memory the values of a program take together, at the moments when they take the most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gt.sharding.solver.pairwise_model import Costs
from gt.sharding.solver.recorded_program import STATE, RecordedProgram


class UpdateGroups(NamedTuple):
    """The updates of parameters, which run in a parameter's layout, since the state is created like it.

    - `ops`: the numbers of the ops that update each parameter
    - `of_op`: the parameter that an op updates, by number
    - `of_value`: the parameter of the values that are kept in its layout: its later versions, its state
    - `gradients`: values that an update takes from outside, and the parameter
    """

    ops: Mapping[str, tuple[int, ...]]
    of_op: Mapping[int, str]
    of_value: Mapping[str, str]
    gradients: tuple[tuple[str, str], ...]


def update_groups(program: RecordedProgram) -> UpdateGroups:
    """The updates of the parameters of a program. Values of one shape that an op of a step relates belong together."""
    group: dict[str, str] = {}

    def root(value: str) -> str:
        while group.setdefault(value, value) != value:
            group[value] = group[group[value]]
            value = group[value]
        return value

    made_before = {value for op in program.ops if not op.in_update for value in op.outputs}
    updates = [(number, op) for number, op in enumerate(program.ops) if op.in_update]
    for _, op in updates:
        shape = op.call.outputs[0].shape if op.call.outputs else ()
        related = [v for v in (*op.inputs, *op.outputs) if program.values[v].shape == shape and shape]
        own = [value for value in related if value not in made_before]
        for one, other in pairwise(own):
            group[root(one)] = root(other)
    parameter_of = {root(value): value for value in program.names if value in group}
    of_value = {
        value: parameter_of[root(value)]
        for value in list(group)
        if root(value) in parameter_of and value not in program.names
    }
    of_op, ops, gradients = {}, {name: [] for name in program.names}, []  # type: ignore[var-annotated]
    for number, op in updates:
        owners = {of_value.get(value, value) for value in op.outputs} & {*program.names}
        if len(owners) == 1:
            (owner,) = owners
            of_op[number] = owner
            ops[owner].append(number)
            gradients += [(value, owner) for value in op.inputs if value in made_before]
    return UpdateGroups(
        {name: tuple(numbers) for name, numbers in ops.items()}, of_op, of_value, tuple(dict.fromkeys(gradients))
    )


MOMENTS = 3  # largest number of moments whose memory is limited


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
    """The numbers of the first and the last op during which each value with its own memory exists. What exists
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
