"""Layouts for a whole program: what the user says about some values is carried to all the others.

The way of Shardy, in three loops. The outer one is over the user's priorities: dims of a later priority are empty, may
not be cut and keep their axes to themselves until it is their turn. The middle one is over the levels of
program_flow.py. The inner one is over strategies: `basic` gives a factor the axes that all tensors of an op can have;
`aggressive` then gives them to those that can, and where an axis is wanted for two factors, the larger tensor decides.
Nothing here names an op.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from gt.core.errors import LayoutError
from gt.sharding.constraints import Constraint, DimConstraint
from gt.sharding.factors import Dim, Ref
from gt.sharding.program_flow import LEVELS, Flow, Place, RecordedProgram, flows_of
from gt.sharding.spec import DeviceMesh, DimSpec, balanced_cuts

BASIC, AGGRESSIVE = "basic", "aggressive"
STRATEGIES = {BASIC: (BASIC,), AGGRESSIVE: (BASIC, AGGRESSIVE)}


class Round(NamedTuple):
    """Where the three loops are."""

    priority: int
    level: int
    strategy: str


class Decision(NamedTuple):
    """Why a dim of a value is cut by axes that the user did not name: some op has the same factor in `source`, which is
    cut by them."""

    value: str
    dim: int
    axes: DimSpec
    source: str
    factor: str
    op: str
    number: int
    turn: Round

    def __str__(self) -> str:
        return (
            f"dim {self.dim} of {self.value} is cut by {' '.join(self.axes)} as {self.source} is, along {self.factor} "
            f"of op {self.number}, {self.op} (priority {self.turn.priority}, level {self.turn.level}, "
            f"{self.turn.strategy})"
        )


class Propagation(NamedTuple):
    """The layout of every value, and how it came about, in the order of the decisions. What the user left open is still
    open; priorities are spent."""

    layouts: Mapping[str, Constraint]
    decisions: tuple[Decision, ...]

    def explain(self, value: str) -> tuple[Decision, ...]:
        """The decisions that led to the layout of a value, from the user's constraints on."""
        found = []
        wanted = {(value, axis) for wish in self.layouts[value].dims for axis in wish.axes}
        for decision in reversed(self.decisions):
            if wanted.intersection([(decision.value, axis) for axis in decision.axes]):
                wanted.update([(decision.source, axis) for axis in decision.axes])
                found.append(decision)
        return tuple(reversed(found))


def run_hierarchical_propagation_pass(
    program: RecordedProgram, mesh: DeviceMesh, constraints: Mapping[str, Constraint], strategy: str = AGGRESSIVE
) -> Propagation:
    """A layout on one mesh for every value of a program, from constraints on some of them."""
    if strategy not in STRATEGIES:
        raise LayoutError(f"{strategy!r} is no strategy of propagation; there are {', '.join(STRATEGIES)}")
    for value, constraint in constraints.items():
        _check_constraint(program, mesh, value, constraint)
    flows = flows_of(program)
    layouts = _Layouts(program, mesh, constraints)
    for priority in sorted({0, *(wish.priority for c in constraints.values() for wish in c.dims)}):
        layouts.admit(priority)
        for level in LEVELS:
            while any(layouts.settle(flows, Round(priority, level, name)) for name in STRATEGIES[strategy]):
                pass
    return layouts.finish()


def _check_constraint(program: RecordedProgram, mesh: DeviceMesh, value: str, constraint: Constraint) -> None:
    if value not in program.values:
        near = difflib.get_close_matches(value, program.values, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise LayoutError(f"there is a constraint on {value!r}, but the program has no such value{hint}")
    shape = program.values[value].shape
    if constraint.mesh is not mesh:
        raise LayoutError(f"the constraint '{constraint}' of {value!r} is on {constraint.mesh}, the program on {mesh}")
    if len(constraint.dims) != len(shape):
        raise LayoutError(
            f"the constraint '{constraint}' of {value!r} has {len(constraint.dims)} dims, but its shape {shape} has "
            f"{len(shape)}; name axes, or '-', for each"
        )


class _Layouts:
    """How the dims of every value are cut so far. Axes are only ever added, as the minor ones of a dim."""

    def __init__(self, program: RecordedProgram, mesh: DeviceMesh, constraints: Mapping[str, Constraint]) -> None:
        self._mesh = mesh
        self._program = program
        free = {value: Constraint(mesh, (DimConstraint(),) * len(meta.shape)) for value, meta in program.values.items()}
        self._asked = free | dict(constraints)
        self._dims = {value: [DimConstraint(is_open=False)] * len(asked.dims) for value, asked in self._asked.items()}
        self._reserved: dict[str, frozenset[str]] = {}
        self._decisions: list[Decision] = []
        self._turn = Round(0, 0, BASIC)
        self._clock = 0
        self._changed_at = dict.fromkeys(program.values, 0)
        self._projected: dict[Place, tuple[int, dict[str, DimSpec]]] = {}

    def admit(self, priority: int) -> None:
        """It is the turn of the dims of a priority."""
        for value, asked in self._asked.items():
            for dim, wish in enumerate(asked.dims):
                if wish.priority == priority:
                    self._set(value, dim, wish._replace(priority=0))
            later = [axis for wish in asked.dims if wish.priority > priority for axis in wish.axes]
            self._reserved[value] = frozenset([*later, *asked.partial])

    def settle(self, flows: Sequence[Flow], turn: Round) -> bool:
        """Go through a program forwards and backwards until nothing changes; whether anything did."""
        self._turn = turn
        before, order = self._clock, list(flows)
        visits: dict[Flow, int] = {}
        while True:
            start = self._clock
            for flow in order:
                if max([self._changed_at[place.value] for place in flow.places]) > visits.get(flow, -1):
                    visits[flow] = self._clock
                    self._spread(flow)
            if self._clock == start:
                return start > before
            order.reverse()

    def finish(self) -> Propagation:
        layouts = {value: asked._replace(dims=tuple(self._dims[value])) for value, asked in self._asked.items()}
        return Propagation(layouts, tuple(self._decisions))

    def _set(self, value: str, dim: int, wish: DimConstraint) -> None:
        self._dims[value][dim] = wish
        self._clock += 1
        self._changed_at[value] = self._clock

    # One op

    def _spread(self, flow: Flow) -> None:
        if not any(self._axes(place.value) for place in flow.places):
            return
        if self._turn.strategy == AGGRESSIVE:
            self._fill(flow, {factor: self._agreed(flow, factor) for factor in flow.cuttable})
            return
        for factor in flow.cuttable:
            self._fill(flow, {factor: self._undisputed(flow, factor, self._agreed(flow, factor))})

    def _agreed(self, flow: Flow, factor: str) -> DimSpec:
        """The longest list of axes that some tensor gives for a factor, as far as no other has a different one. None
        where nobody lacks any."""
        given = [self._of(flow, place)[factor] for place in flow.givers(factor, self._turn.level)]
        axes = max(given, key=len, default=())
        there = [self._of(flow, place)[factor] for place in flow.places if factor in place.where] if axes else []
        for other in there:
            axes = axes[: _compatible(axes, other)]
        return axes if any(len(other) < len(axes) for other in there) else ()

    def _undisputed(self, flow: Flow, factor: str, axes: DimSpec) -> DimSpec:
        """Axes up to the first one that cuts something else in some tensor, or that some tensor cannot take."""
        for place in flow.places:
            own = self._of(flow, place).get(factor, ())
            axes = _until(axes, [axis for axis in self._axes(place.value) if axis not in own])
            while factor in place.where and axes and not self._fits(flow, place, factor, axes):
                axes = axes[:-1]
        return axes

    def _fill(self, flow: Flow, wanted: Mapping[str, DimSpec]) -> None:
        """Give tensors the axes that they lack: results before operands, and the axes of the largest tensor first."""
        sources = {factor: self._source(flow, factor, axes) for factor, axes in wanted.items() if axes}
        order = sorted(sources, key=lambda factor: self._rank(flow, factor, sources[factor], wanted[factor]))
        for place in (*flow.results, *flow.operands):
            for factor in order:
                if flow.receives(place, factor, self._turn.level):
                    axes = self._not_sideways(flow, place, factor, wanted[factor])
                    self._extend(flow, place, factor, axes, sources[factor].value)

    def _source(self, flow: Flow, factor: str, axes: DimSpec) -> Place:
        """The largest tensor that has the axes already."""
        givers = flow.givers(factor, self._turn.level)
        having = [place for place in givers if self._of(flow, place)[factor][: len(axes)] == axes]
        return max(having, key=lambda place: self._program.values[place.value].nbytes)

    def _rank(self, flow: Flow, factor: str, source: Place, axes: DimSpec) -> tuple[int, ...]:
        size = self._program.values[source.value].nbytes
        shards = self._count(axes) if flow.passes else 0
        return -size, -shards, flow.places.index(source), flow.cuttable.index(factor)

    def _not_sideways(self, flow: Flow, place: Place, factor: str, axes: DimSpec) -> DimSpec:
        """Where the results have all factors, an operand gets from another one only what a result got too."""
        there = [self._of(flow, result)[factor] for result in flow.results if factor in result.where]
        if not flow.passes or not there or place in flow.results:
            return axes
        return axes[: max([_common(axes, other) for other in there])]

    def _extend(self, flow: Flow, place: Place, factor: str, axes: DimSpec, source: str) -> None:
        have = self._of(flow, place)[factor]
        added = _until(axes[len(have) :], self._axes(place.value))
        while added and not self._fits(flow, place, factor, (*have, *added)):
            added = added[:-1]
        if added:
            dim, _ = place.where[factor]
            wish = self._dims[place.value][dim]
            self._set(place.value, dim, wish._replace(axes=(*wish.axes, *added)))
            op = self._program.ops[flow.op].call.op
            self._decisions.append(Decision(place.value, dim, added, source, factor, op, flow.op, self._turn))

    # Dims and factors

    def _axes(self, value: str) -> DimSpec:
        return tuple([axis for wish in self._dims[value] for axis in wish.axes])

    def _count(self, axes: DimSpec) -> int:
        return math.prod([self._mesh.axis_size(axis) for axis in axes])

    def _of(self, flow: Flow, place: Place) -> dict[str, DimSpec]:
        """The axes of each factor of a tensor."""
        version, found = self._projected.get(place, (-1, {}))
        if version != self._changed_at[place.value]:
            found = {}
            for refs, wish in zip(place.dims, self._dims[place.value], strict=True):
                found.update(self._project(flow, refs, wish.axes))
            self._projected[place] = self._changed_at[place.value], found
        return found

    def _project(self, flow: Flow, refs: Dim, axes: DimSpec) -> Iterator[tuple[str, DimSpec]]:
        """A dim's axes go to its factors, major first. One that is not the last takes axes that divide it, and the next
        one gets some when it is cut to single elements; what is left over then belongs to none."""
        for number, ref in enumerate(refs):
            size, taken = flow.factors[ref.factor].size, axes
            while taken and number + 1 < len(refs) and size % self._count(taken):
                taken = taken[:-1]
            yield ref.factor, taken
            axes = axes[len(taken) :] if self._count(taken) == size else ()

    def _fits(self, flow: Flow, place: Place, factor: str, axes: DimSpec) -> bool:
        """Whether a tensor has these axes on a factor, or may get them: no worker is left without elements, and the
        shards are those of the dim as it is cut by default."""
        own = self._of(flow, place)
        added = axes[len(own[factor]) :]
        dim, number = place.where[factor]
        refs, wish = place.dims[dim], self._dims[place.value][dim]
        if not added:
            return True
        if not wish.is_open or self._reserved[place.value].intersection(added):
            return False
        if sum(len(own[ref.factor]) for ref in refs) != len(wish.axes):
            return False  # some axes of the dim belong to no factor
        if any(self._count(own[ref.factor]) != flow.factors[ref.factor].size for ref in refs[:number]):
            return False  # the shards would be strided
        size, count = flow.factors[factor].size, self._count(axes)
        if number + 1 < len(refs):
            return size % count == 0
        return count <= size and self._shows(refs[number], size, axes, self._program.values[place.value].shape[dim])

    def _shows(self, ref: Ref, size: int, axes: DimSpec, dim_size: int) -> bool:
        if ref.window is None:
            return True
        counts = tuple([self._mesh.axis_size(axis) for axis in axes])
        return math.prod(counts) <= dim_size and ref.window.cuts(balanced_cuts(size, counts)) is not None


def _common(one: DimSpec, other: DimSpec) -> int:
    """How many axes two lists begin with in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _compatible(axes: DimSpec, other: DimSpec) -> int:
    """How many axes of a list another one agrees with: all, where one of them continues the other."""
    common = _common(axes, other)
    return len(axes) if common == min(len(axes), len(other)) else common


def _until(axes: DimSpec, taken: Collection[str]) -> DimSpec:
    return axes[: next((n for n, axis in enumerate(axes) if axis in taken), len(axes))]
