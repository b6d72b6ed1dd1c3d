"""Descriptions of bound ops for recorded timelines: names, layouts of results, and moves."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from gt.core.signatures import Compute, Move, SpecRecord
from gt.sharding.spec import spec_of
from gt.sharding.spec_text import describe_spec
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.bound_programs import AnyBoundOp


class OpDescription(NamedTuple):
    """The fields of a `Ran` that are the same for all runs of an op: see there."""

    name: str
    ops: int
    layouts: tuple[str, ...] = ()
    moves: tuple[tuple[str, str], ...] = ()


_described: WeakKeyDictionary[AnyBoundOp, OpDescription] = WeakKeyDictionary()


def describe_bound(bound: AnyBoundOp) -> OpDescription:
    found = _described.get(bound)
    if found is None:
        found = _described[bound] = _describe(bound)
    return found


def _describe(bound: AnyBoundOp) -> OpDescription:
    if not isinstance(bound, BoundOpProgram):
        return OpDescription(bound.op, 1)
    program = bound.program
    specs: dict[int, SpecRecord] = {}
    for step in program.steps:
        if isinstance(step, Compute):
            specs.update(zip(step.outputs, step.result_specs, strict=False))
        elif isinstance(step, Move):
            specs[step.output] = step.target
    layouts = [describe_spec(spec_of(specs[register])) for register in program.gives if register in specs]
    moves = [(_text(step.source), _text(step.target)) for step in program.steps if isinstance(step, Move)]
    is_op = not all(isinstance(step, Move) for step in program.steps)
    changes = [(source, target) for source, target in moves if source != target]
    return OpDescription(bound.op, int(is_op), tuple(dict.fromkeys(layouts)), tuple(dict.fromkeys(changes)))


def _text(record: SpecRecord) -> str:
    return describe_spec(spec_of(record))
