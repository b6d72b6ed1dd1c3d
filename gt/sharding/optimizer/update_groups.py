"""The updates of parameters: the ops of an optimizer's step that belong to one parameter, and the state they use. They
run in the layout of the parameter, since the state is created like it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from gt.sharding.optimizer.recorded_program import RecordedProgram


class UpdateGroups(NamedTuple):
    """- `ops`: the numbers of the ops that update each parameter
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
