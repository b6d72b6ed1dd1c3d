"""The smallest program that still differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.programs import Leaf, Program, Side, Step, run


def shrink(program: Program, differs: Callable[[Program], bool], seconds: float = 30.0) -> Program:
    """Make a program smaller while it differs, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    smaller: Program | None = program
    while smaller is not None and time.monotonic() < deadline:
        program = smaller
        smaller = next((candidate for candidate in _smaller(program) if _is_one(candidate, differs, deadline)), None)
    return program


def _is_one(program: Program, differs: Callable[[Program], bool], deadline: float) -> bool:
    if time.monotonic() > deadline:
        return False
    try:
        run(program, Side())
    except Exception:  # torch refuses it: not a program
        return False
    return differs(program)


def _smaller(program: Program) -> Iterator[Program]:
    for place in range(len(program.steps) - 1, -1, -1):
        yield from _without_step(program, place)
    for place, leaf in enumerate(program.leaves):
        for simple in _simpler(leaf):
            yield _with_leaf(program, place, simple)
    for place, step in enumerate(program.steps):
        if step.layout:
            yield replace(program, steps=(*program.steps[:place], replace(step, layout=0), *program.steps[place + 1 :]))


def _simpler(leaf: Leaf) -> Iterator[Leaf]:
    if leaf.format != "contiguous":
        yield replace(leaf, format="contiguous")
    if leaf.needs_grad:
        yield replace(leaf, needs_grad=False)
    if leaf.odd:
        yield replace(leaf, odd=0)


def _with_leaf(program: Program, place: int, leaf: Leaf) -> Program:
    return replace(program, leaves=(*program.leaves[:place], leaf, *program.leaves[place + 1 :]))


def _without_step(program: Program, place: int) -> Iterator[Program]:
    """A step's result becomes one of its inputs of the same shape, or a new leaf, or (the last one) nothing."""
    own = len(program.leaves)
    register = own + place
    if not any(register in step.inputs for step in program.steps):
        yield _cleaned(replace(program, steps=_dropped(program.steps, place, register, register)))
        return
    shapes = _shapes(program)
    for source in program.steps[place].inputs:
        if shapes[source] == shapes[register]:
            yield _cleaned(replace(program, steps=_dropped(program.steps, place, register, source)))
    yield _cleaned(_with_new_leaf(program, place, shapes[register]))


def _shapes(program: Program) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in run(program, Side()).registers]


def _dropped(steps: tuple[Step, ...], place: int, register: int, instead: int) -> tuple[Step, ...]:
    def renamed(number: int) -> int:
        number = instead if number == register else number
        return number - 1 if number > register else number

    kept = [step for number, step in enumerate(steps) if number != place]
    return tuple([replace(step, inputs=tuple(map(renamed, step.inputs))) for step in kept])


def _with_new_leaf(program: Program, place: int, shape: tuple[int, ...]) -> Program:
    own, register = len(program.leaves), len(program.leaves) + place

    def renamed(number: int) -> int:
        if number == register:
            return own
        return number if number < own or number > register else number + 1

    kept = [step for number, step in enumerate(program.steps) if number != place]
    steps = tuple([replace(step, inputs=tuple(map(renamed, step.inputs))) for step in kept])
    return replace(program, leaves=(*program.leaves, Leaf(shape, seed=own + 1)), steps=steps)


def _cleaned(program: Program) -> Program:
    """Without leaves that no step uses."""
    used = {number for step in program.steps for number in step.inputs}
    unused = [place for place in range(len(program.leaves)) if place not in used]
    if not unused or len(unused) == len(program.leaves):
        return program
    names = {old: new for new, old in enumerate([n for n in range(_count(program)) if n not in unused])}
    steps = [replace(step, inputs=tuple([names[number] for number in step.inputs])) for step in program.steps]
    leaves = tuple([leaf for place, leaf in enumerate(program.leaves) if place in used])
    return replace(program, leaves=leaves, steps=tuple(steps))


def _count(program: Program) -> int:
    return len(program.leaves) + len(program.steps)
