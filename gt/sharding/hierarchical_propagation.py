"""Layouts for all values of a program trace, propagated from constraints on some of them: those of a plan of
`gt.auto_shard`, which explains itself by them. The dispatcher plans op by op and does not use it.

The algorithm of Shardy, in three nested loops:

* priorities of the user's constraints: a dim is cut in the round of its priority, and its axes are reserved for it
  until then;
* levels of program_trace.py: certain paths before uncertain ones;
* eagerness: `basic` gives a factor the axes that all tensors of an op accept; `aggressive` then gives them to each
  tensor that accepts them, and if two factors compete for an axis, the larger tensor decides.

Nothing here names an op.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from gt.core.errors import LayoutError, nearest
from gt.sharding.boxes import balanced_cuts
from gt.sharding.constraints import Constraint, DimConstraint
from gt.sharding.factors import Dim, FactorRef
from gt.sharding.program_trace import LEVELS, Flow, FlowTensor, ProgramTrace, flows_of
from gt.sharding.spec import DeviceMesh, DimSpec

BASIC, AGGRESSIVE = "basic", "aggressive"
EAGERNESS = {BASIC: (BASIC,), AGGRESSIVE: (BASIC, AGGRESSIVE)}


class Round(NamedTuple):
    """The state of the three loops."""

    priority: int
    level: int
    eagerness: str


class Decision(NamedTuple):
    """Why a dim of a value is cut by axes that the user did not name: `source`, which an op relates to it by a factor,
    is cut by them."""

    value: str
    dim: int
    axes: DimSpec
    source: str
    factor: str
    op: str
    number: int
    round: Round

    def __str__(self) -> str:
        return (
            f"dim {self.dim} of {self.value} is cut by {' '.join(self.axes)} as {self.source} is, along {self.factor} "
            f"of op {self.number}, {self.op} (priority {self.round.priority}, level {self.round.level}, "
            f"{self.round.eagerness})"
        )


class Propagation(NamedTuple):
    """The layout of every value, and the decisions that led to it, in order. Dims that the user left open are still
    open; priorities are 0."""

    layouts: Mapping[str, Constraint]
    decisions: tuple[Decision, ...]

    def explain(self, value: str) -> tuple[Decision, ...]:
        """The decisions that led from the user's constraints to the layout of a value."""
        if value not in self.layouts:
            raise LayoutError(f"the program has no value {value!r}; {nearest(value, self.layouts)}")
        found = []
        unexplained = {(value, axis) for dim in self.layouts[value].dims for axis in dim.axes}
        for decision in reversed(self.decisions):
            if unexplained.intersection([(decision.value, axis) for axis in decision.axes]):
                unexplained.update([(decision.source, axis) for axis in decision.axes])
                found.append(decision)
        return tuple(reversed(found))


def run_hierarchical_propagation_pass(
    program: ProgramTrace, mesh: DeviceMesh, constraints: Mapping[str, Constraint], eagerness: str = AGGRESSIVE
) -> Propagation:
    """A layout on one mesh for every value of a program, from constraints on some of them."""
    if eagerness not in EAGERNESS:
        raise LayoutError(f"{eagerness!r} is no eagerness of propagation; there are {', '.join(EAGERNESS)}")
    for value, constraint in constraints.items():
        _check_constraint(program, mesh, value, constraint)
    flows = flows_of(program)
    state = _PropagationState(program, mesh, constraints)
    for priority in sorted({0, *(dim.priority for constraint in constraints.values() for dim in constraint.dims)}):
        state.start_priority(priority)
        for level in LEVELS:
            while any(state.run_to_fixpoint(flows, Round(priority, level, name)) for name in EAGERNESS[eagerness]):
                pass
    return state.finish()


def _check_constraint(program: ProgramTrace, mesh: DeviceMesh, value: str, constraint: Constraint) -> None:
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


class _PropagationState:
    """The layouts so far. Axes are only ever added, as the minor ones of a dim."""

    def __init__(self, program: ProgramTrace, mesh: DeviceMesh, constraints: Mapping[str, Constraint]) -> None:
        self._mesh = mesh
        self._program = program
        free = {value: Constraint(mesh, (DimConstraint(),) * len(meta.shape)) for value, meta in program.values.items()}
        self._requested = free | dict(constraints)
        self._dims = {
            value: [DimConstraint(is_open=False)] * len(requested.dims) for value, requested in self._requested.items()
        }
        self._reserved: dict[str, frozenset[str]] = {}
        self._decisions: list[Decision] = []
        self._round = Round(0, 0, BASIC)
        self._changes = 0
        self._changed_at = dict.fromkeys(program.values, 0)
        self._projected: dict[FlowTensor, tuple[int, dict[str, DimSpec]]] = {}

    def start_priority(self, priority: int) -> None:
        """Apply the constraints of a priority, and reserve the axes of later ones."""
        for value, requested in self._requested.items():
            for dim, constraint in enumerate(requested.dims):
                if constraint.priority == priority:
                    self._set_dim(value, dim, constraint._replace(priority=0))
            later = [
                axis for constraint in requested.dims if constraint.priority > priority for axis in constraint.axes
            ]
            self._reserved[value] = frozenset([*later, *requested.partial])

    def run_to_fixpoint(self, flows: Sequence[Flow], round: Round) -> bool:
        """Go through the program forwards and backwards until nothing changes. Returns whether anything did."""
        self._round = round
        before, order = self._changes, list(flows)
        visits: dict[Flow, int] = {}
        while True:
            start = self._changes
            for flow in order:
                if max([self._changed_at[tensor.value] for tensor in flow.tensors]) > visits.get(flow, -1):
                    visits[flow] = self._changes
                    self._propagate_op(flow)
            if self._changes == start:
                return start > before
            order.reverse()

    def finish(self) -> Propagation:
        layouts = {
            value: requested._replace(dims=tuple(self._dims[value])) for value, requested in self._requested.items()
        }
        return Propagation(layouts, tuple(self._decisions))

    def _set_dim(self, value: str, dim: int, constraint: DimConstraint) -> None:
        self._dims[value][dim] = constraint
        self._changes += 1
        self._changed_at[value] = self._changes

    # One op

    def _propagate_op(self, flow: Flow) -> None:
        if not any(self._axes(tensor.value) for tensor in flow.tensors):
            return
        if self._round.eagerness == AGGRESSIVE:
            self._assign(flow, {factor: self._common_axes(flow, factor) for factor in flow.cuttable})
            return
        for factor in flow.cuttable:
            self._assign(flow, {factor: self._acceptable_axes(flow, factor, self._common_axes(flow, factor))})

    def _common_axes(self, flow: Flow, factor: str) -> DimSpec:
        """The longest list of axes that a tensor has for a factor, up to the first that contradicts another tensor's;
        empty if all tensors have them already."""
        given = [self._factor_axes(flow, tensor)[factor] for tensor in flow.sources(factor, self._round.level)]
        axes = max(given, key=len, default=())
        existing = (
            [self._factor_axes(flow, tensor)[factor] for tensor in flow.tensors if factor in tensor.positions]
            if axes
            else []
        )
        for other in existing:
            axes = axes[: _agreeing_prefix(axes, other)]
        return axes if any(len(other) < len(axes) for other in existing) else ()

    def _acceptable_axes(self, flow: Flow, factor: str, axes: DimSpec) -> DimSpec:
        """The axes up to the first that some tensor uses for another factor or cannot accept."""
        for tensor in flow.tensors:
            own = self._factor_axes(flow, tensor).get(factor, ())
            axes = _before_any(axes, [axis for axis in self._axes(tensor.value) if axis not in own])
            while factor in tensor.positions and axes and not self._fits(flow, tensor, factor, axes):
                axes = axes[:-1]
        return axes

    def _assign(self, flow: Flow, chosen: Mapping[str, DimSpec]) -> None:
        """Add missing axes to tensors: to results before operands, and the axes of the largest source first."""
        sources = {factor: self._source(flow, factor, axes) for factor, axes in chosen.items() if axes}
        order = sorted(sources, key=lambda factor: self._rank(flow, factor, sources[factor], chosen[factor]))
        for tensor in (*flow.results, *flow.operands):
            for factor in order:
                if flow.receives(tensor, factor, self._round.level):
                    axes = self._limited_to_results(flow, tensor, factor, chosen[factor])
                    self._extend(flow, tensor, factor, axes, sources[factor].value)

    def _source(self, flow: Flow, factor: str, axes: DimSpec) -> FlowTensor:
        """The largest tensor that has the axes."""
        candidates = flow.sources(factor, self._round.level)
        having = [tensor for tensor in candidates if self._factor_axes(flow, tensor)[factor][: len(axes)] == axes]
        return max(having, key=lambda tensor: self._program.values[tensor.value].nbytes)

    def _rank(self, flow: Flow, factor: str, source: FlowTensor, axes: DimSpec) -> tuple[int, ...]:
        size = self._program.values[source.value].nbytes
        shards = self._count(axes) if flow.passes_all else 0
        return -size, -shards, flow.tensors.index(source), flow.cuttable.index(factor)

    def _limited_to_results(self, flow: Flow, tensor: FlowTensor, factor: str, axes: DimSpec) -> DimSpec:
        """The axes that an operand may get: if the op passes all factors, only those that a result has too, since axes
        do not propagate sideways from operand to operand."""
        existing = [self._factor_axes(flow, result)[factor] for result in flow.results if factor in result.positions]
        if not flow.passes_all or not existing or tensor in flow.results:
            return axes
        return axes[: max([_common_prefix(axes, other) for other in existing])]

    def _extend(self, flow: Flow, tensor: FlowTensor, factor: str, axes: DimSpec, source: str) -> None:
        own_axes = self._factor_axes(flow, tensor)[factor]
        added = _before_any(axes[len(own_axes) :], self._axes(tensor.value))
        while added and not self._fits(flow, tensor, factor, (*own_axes, *added)):
            added = added[:-1]
        if added:
            dim, _ = tensor.positions[factor]
            constraint = self._dims[tensor.value][dim]
            self._set_dim(tensor.value, dim, constraint._replace(axes=(*constraint.axes, *added)))
            op = self._program.ops[flow.op].call.op
            self._decisions.append(Decision(tensor.value, dim, added, source, factor, op, flow.op, self._round))

    # Dims and factors

    def _axes(self, value: str) -> DimSpec:
        return tuple([axis for constraint in self._dims[value] for axis in constraint.axes])

    def _count(self, axes: DimSpec) -> int:
        return math.prod([self._mesh.axis_size(axis) for axis in axes])

    def _factor_axes(self, flow: Flow, tensor: FlowTensor) -> dict[str, DimSpec]:
        """The axes of each factor of a tensor."""
        version, found = self._projected.get(tensor, (-1, {}))
        if version != self._changed_at[tensor.value]:
            found = {}
            for refs, constraint in zip(tensor.dims, self._dims[tensor.value], strict=True):
                found.update(self._project(flow, refs, constraint.axes))
            self._projected[tensor] = self._changed_at[tensor.value], found
        return found

    def _project(self, flow: Flow, refs: Dim, axes: DimSpec) -> Iterator[tuple[str, DimSpec]]:
        """The axes of each factor of a dim, major first. A factor but the last takes only axes that divide it; the next
        one gets axes only if it is cut into shards of one element. Axes left over belong to no factor."""
        for number, ref in enumerate(refs):
            size, taken = flow.factors[ref.factor].size, axes
            while taken and number + 1 < len(refs) and size % self._count(taken):
                taken = taken[:-1]
            yield ref.factor, taken
            axes = axes[len(taken) :] if self._count(taken) == size else ()

    def _fits(self, flow: Flow, tensor: FlowTensor, factor: str, axes: DimSpec) -> bool:
        """Whether a tensor has these axes on a factor or can get them, with default cuts of the dim and no worker left
        without elements."""
        own = self._factor_axes(flow, tensor)
        added = axes[len(own[factor]) :]
        dim, number = tensor.positions[factor]
        refs, constraint = tensor.dims[dim], self._dims[tensor.value][dim]
        if not added:
            return True
        if not constraint.is_open or self._reserved[tensor.value].intersection(added):
            return False
        if sum(len(own[ref.factor]) for ref in refs) != len(constraint.axes):
            return False  # some axes of the dim belong to no factor
        if any(self._count(own[ref.factor]) != flow.factors[ref.factor].size for ref in refs[:number]):
            return False  # the shards would be strided
        size, count = flow.factors[factor].size, self._count(axes)
        if number + 1 < len(refs):
            return size % count == 0
        return count <= size and self._window_fits(
            refs[number], size, axes, self._program.values[tensor.value].shape[dim]
        )

    def _window_fits(self, ref: FactorRef, size: int, axes: DimSpec, dim_size: int) -> bool:
        if ref.window is None:
            return True
        counts = tuple([self._mesh.axis_size(axis) for axis in axes])
        return math.prod(counts) <= dim_size and ref.window.cuts(balanced_cuts(size, counts)) is not None


def _common_prefix(one: DimSpec, other: DimSpec) -> int:
    """The length of the common prefix of two lists of axes."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _agreeing_prefix(axes: DimSpec, other: DimSpec) -> int:
    """The length of the prefix of `axes` that does not contradict `other`: all if one continues the other."""
    common = _common_prefix(axes, other)
    return len(axes) if common == min(len(axes), len(other)) else common


def _before_any(axes: DimSpec, taken: Collection[str]) -> DimSpec:
    return axes[: next((n for n, axis in enumerate(axes) if axis in taken), len(axes))]
