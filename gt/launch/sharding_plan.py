"""`Plan`: the layouts that `gt.auto_shard` has chosen, what they cost, and why. It prints, writes itself as a signals
file, and applies itself to the model."""

from __future__ import annotations

import fnmatch
import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from gt.client.model_layout import apply_model_config, check_layouts
from gt.client.parameter_layouts import lay_out_state
from gt.client.step_recorder import StepObjects
from gt.core.errors import SignalError, nearest
from gt.core.output_files import open_text
from gt.core.tables import print_bytes
from gt.dispatcher.step_replay import ReplayedStep
from gt.launch.plan_search import DATA_PARALLEL, FULLY_SHARDED, REFINED, SOLVER, Candidate, PlanSearch, check_mesh
from gt.sharding.calibration import Calibration
from gt.sharding.constraints import Constraint, DimConstraint
from gt.sharding.hierarchical_propagation import Propagation, run_hierarchical_propagation_pass
from gt.sharding.solver.name_patterns import as_patterns, without_numbers
from gt.sharding.solver.op_strategies import layouts_of
from gt.sharding.solver.recorded_program import INPUT, OUTPUT, Boundary, RecordedProgram, RecordedSteps
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.signals.config import AxesPerDim, Config, ModelConfig, OutputEntry, ParameterEntry
from gt.signals.document import dims_text, model_text
from gt.signals.parser import read_config
from gt.signals.registry import registry
from gt.signals.resolution import resolve_activation, resolve_spec

_NO_LAYOUT = "as it is"
_ORIGINS = {
    SOLVER: "proposed by the solver",
    DATA_PARALLEL: "the data parallel plan",
    FULLY_SHARDED: "the fully sharded plan",
    REFINED: "refined entry by entry",
}


class Alternative(NamedTuple):
    """Another layout of one tensor, all others as planned, and what a step costs with it."""

    layout: str
    seconds: float
    nbytes: int
    peak: int
    fits: bool


class Explanation(NamedTuple):
    """The layout of a parameter, or of the results of a module, and its alternatives, the fastest first."""

    name: str
    layout: str
    seconds: float
    alternatives: tuple[Alternative, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.name} is {self.layout}: {_ms(self.seconds)} a step. Instead, with all others as planned:"]
        for other in self.alternatives:
            change = (other.seconds - self.seconds) * 1e3
            fits = "" if other.fits else "  more memory than allowed"
            lines.append(
                f"  {other.layout:<24} {_ms(other.seconds)} ({change:+.3f}), {print_bytes(other.nbytes)} received, "
                f"{print_bytes(other.peak)} on a worker{fits}"
            )
        return "\n".join([*lines, *[f"  {reason}" for reason in self.reasons]])


class Plan:
    """The layouts of a program, as `gt.auto_shard` returns them.

    - `mesh`, `config`: the mesh, and the `model` section of a configuration that says the layouts
    - `cost`: the seconds of a step, `bytes` those that all workers together receive in it, and `memory` the most bytes
      that a worker holds
    - `gap`: the share of the cost of the solver's answer that any other answer could save at most, by its own model
    - `candidates`: all that were compared, the fastest first

    >>> gt.init(workers=4, mode="shapes")
    >>> model = gt.to(torch.nn.Linear(64, 64))
    >>> plan = gt.auto_shard(lambda x: model(x).sum().backward(), torch.ones(32, 64), mesh="2x2", model=model)
    >>> "model:" in plan.to_yaml(), plan.cost > 0
    (True, True)
    """

    def __init__(
        self,
        search: PlanSearch,
        candidates: Sequence[Candidate],
        steps: RecordedSteps,
        program: RecordedProgram,
        machine: Calibration,
        limit: int | None,
        objects: StepObjects,
        *,
        is_compiled: bool,
    ) -> None:
        self._search = search
        self._steps = steps
        self._objects = objects
        self.program = program
        self.machine = machine
        self.limit = limit
        self.candidates = tuple(sorted(candidates, key=lambda each: each.cost.seconds))
        self._best = self.candidates[0]
        self.config = replace(self._best.config, eager_memory=None if is_compiled else limit)

    @property
    def mesh(self) -> DeviceMesh:
        return self._best.mesh

    @property
    def cost(self) -> float:
        return self._best.cost.seconds

    @property
    def bytes(self) -> int:
        return self._best.cost.nbytes

    @property
    def memory(self) -> int:
        return self._best.cost.peak

    @property
    def gap(self) -> float:
        """That of the solver's answer on the same mesh, where a standard plan was faster than it."""
        found = [each.solution for each in self.candidates if each.solution is not None and each.mesh is self.mesh]
        return (self._best.solution or found[0]).gap if found else 1.0

    # Use

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The plan as a signals file, for `gt.load_config`; written to a file if a path is given."""
        text = model_text(self.config, self._heading(), self._notes())
        if path is not None:
            with open_text(path) as file:
                file.write(text)
        return text

    def apply(self, model: torch.nn.Module | None = None) -> None:
        """Use the plan from now on: lay out the model of the step, or another one, and the state of its optimizers.
        Models that `gt.to` moves later get the layouts too."""
        registry.add(Config({}, self.config))
        module = model if model is not None else self._objects.model
        apply_model_config(module)
        for optimizer in self._objects.optimizers:
            lay_out_state(optimizer)

    def explain(self, name: str) -> Explanation:
        """The alternatives at a parameter, or at the results of a module, and what each would cost."""
        if name in self._steps.parameters:
            return self._explain_parameter(name)
        boundary = next((b for b in self.program.boundaries if b.module == name and b.kind == OUTPUT), None)
        if boundary is None:
            modules = {each.module for each in self.program.boundaries}
            known = [*self._steps.parameters, *filter(None, modules)]
            raise SignalError(f"the plan has no parameter or module {name!r}; {nearest(name, known)}")
        return self._explain_output(boundary)

    def evaluate(self, layouts: ModelConfig | str | Path) -> ReplayedStep:
        """What a step would cost with other layouts on the same mesh: those of a signals file, or of its section
        `model`."""
        config = layouts if isinstance(layouts, ModelConfig) else read_config(layouts, registry.current().signals).model
        if config is None:
            raise SignalError(f"{layouts}: the file has no section `model`, so it lays out nothing")
        check_mesh(config, self.mesh)
        check_layouts(self._objects.model, config, self.mesh)
        return self._search.evaluate(self.mesh, config, "given").cost

    def diff(self, other: Plan) -> str:
        """The layouts in which two plans differ, and their costs. Names that differ in numbers alone share a line."""
        if not isinstance(other, Plan):
            raise TypeError(
                f"plan.diff() compares with another plan of gt.auto_shard, not with a {type(other).__name__}; "
                "plan.evaluate() tells what the layouts of a file would cost"
            )
        rows = [
            (f"{pattern}{suffix}", *texts)
            for suffix, mine, others in zip(("", "", " ->"), self._layouts(), other._layouts(), strict=True)
            for pattern, texts in _differences(mine, others).items()
        ]
        lines = [f"  {name:<48} {mine:<20} {others}" for name, mine, others in rows]
        return "\n".join([_summary(self), _summary(other), *(lines or ["  the layouts are the same"])])

    @cached_property
    def propagation(self) -> Propagation:
        """The layouts of all values that follow from those of the plan, and why (see
        gt.sharding.hierarchical_propagation)."""
        constraints: dict[str, Constraint] = {}
        for value, names in self.program.names.items():
            entry = next((e for name in names if (e := self.config.spec_for(name)) is not None), None)
            rank = len(self.program.values[value].shape)
            constraints[value] = _closed(resolve_spec(entry.dims if entry else (), self.mesh, rank))
        for boundary in self.program.boundaries:
            spec = self._activation_layout(boundary)
            if spec is not None:
                constraints.setdefault(boundary.view, _closed(spec))
        return run_hierarchical_propagation_pass(self.program.trace, self.mesh, constraints)

    # Explanations

    def _activation_layout(self, boundary: Boundary) -> ShardingSpec | None:
        entry = self.config.output_for(boundary.module)
        dims = self.config.inputs if boundary.kind == INPUT else entry.dims if entry is not None else None
        shape = self.program.values[boundary.view].shape
        return None if dims is None else resolve_activation(dims, self.mesh, shape)

    def _explain_parameter(self, name: str) -> Explanation:
        meta = self._steps.metas[self._steps.parameters[name]]
        entry = self.config.spec_for(name)
        now = resolve_spec(entry.dims if entry is not None else (), self.mesh, len(meta.shape)).dims
        tied = [other for other, ident in self._steps.parameters.items() if ident == self._steps.parameters[name]]
        alternatives = [
            self._with(
                [*self.config.parameters, *[ParameterEntry(each, spec.dims) for each in tied]],
                self.config.outputs,
                spec.dims,
            )
            for spec in layouts_of(meta, self.mesh)
            if spec.dims != now
        ]
        return self._explanation(name, now, alternatives, self._reasons(name))

    def _explain_output(self, boundary: Boundary) -> Explanation:
        entry = self.config.output_for(boundary.module)
        now = entry.dims if entry is not None else None
        alternatives = [
            self._with(
                self.config.parameters, [*self.config.outputs, OutputEntry(boundary.module, spec.dims)], spec.dims
            )
            for spec in layouts_of(self.program.values[boundary.view], self.mesh)
            if spec.dims != now
        ]
        return self._explanation(boundary.module, now, alternatives, self._reasons(boundary.view))

    def _with(
        self, parameters: Sequence[ParameterEntry], outputs: Sequence[OutputEntry], dims: AxesPerDim
    ) -> tuple[AxesPerDim, Candidate]:
        own = self.config
        config = ModelConfig(own.mesh, own.workers, parameters, inputs=own.inputs, outputs=outputs)  # type: ignore[arg-type]
        return dims, self._search.evaluate(self.mesh, config, "alternative")

    def _explanation(
        self,
        name: str,
        now: AxesPerDim | None,
        alternatives: Sequence[tuple[AxesPerDim, Candidate]],
        reasons: Sequence[str],
    ) -> Explanation:
        others = [
            Alternative(dims_text(dims), each.cost.seconds, each.cost.nbytes, each.cost.peak, self._search.fits(each))
            for dims, each in alternatives
        ]
        layout = "as the planner leaves it" if now is None else dims_text(now)
        ranked = sorted(others, key=lambda other: other.seconds)
        return Explanation(name, layout, self.cost, tuple(ranked), tuple(reasons))

    def _reasons(self, name: str) -> list[str]:
        """How its layout follows from others, or which values follow it."""
        value = next((v for v, names in self.program.names.items() if name in names), name)
        followers = [str(each) for each in self.propagation.decisions if each.source == value][:3]
        return [*map(str, self.propagation.explain(value)), *followers]

    # Texts

    def _heading(self) -> str:
        best = self._best
        return (
            f"{_summary(self)}\n"
            f"{_ms(best.cost.compute_seconds)} of computation, {_ms(best.cost.communication_seconds)} of "
            f"communication; {_ORIGINS[best.origin]}, gap {self.gap:.2%}\n"
            f"machine: {self.machine.describe(has_hosts=bool(self.mesh.hosts))}"
        )

    def _notes(self) -> dict[str, str]:
        """What each pattern costs: the communication in the modules that it names."""
        notes = {}
        own_patterns = [entry.pattern for entry in self.config.parameters]
        for pattern in [*own_patterns, *[entry.pattern for entry in self.config.outputs]]:
            own = [c for c in self._best.cost.collectives if _is_of(c.module, pattern)]
            if own:
                notes[pattern] = f"{print_bytes(sum(c.nbytes for c in own))}, {_ms(sum(c.waits for c in own))}"
        return notes

    def _layouts(self) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        """The layouts of the plan as texts, by name: of the mesh and the inputs, of parameters, and of the results of
        modules."""
        config, modules = self.config, dict.fromkeys(each.module for each in self.program.boundaries)
        return (
            {"mesh": "x".join(map(str, self.mesh.shape)), "inputs": dims_text(config.inputs or ())},
            {name: _entry_text(config.spec_for(name)) for name in self._steps.parameters},
            {name: _entry_text(config.output_for(name)) for name in modules},
        )

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        """Per kind of module: its name, the layouts of its parameters and results, times, and communication."""
        cost, order = self._best.cost, dict.fromkeys(each.module for each in self.program.ops)
        groups: dict[str, list[str]] = {}
        for module in order:
            pattern = without_numbers(module)
            groups.setdefault(module if pattern == "*" else pattern, []).append(module)
        rows = []
        for pattern, members in groups.items():
            compute = sum(cost.modules.get(module, 0.0) for module in members)
            own = [each for each in cost.collectives if each.module in members]
            kinds = Counter(f"{each.kind} {' '.join(each.axes)}".strip() for each in own)
            what = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "-"
            if own:
                what += f": {print_bytes(sum(each.nbytes for each in own))}"
            waits = sum(each.waits for each in own)
            rows.append(
                (pattern or "(outside of modules)", self._layouts_of(members[0]), _ms(compute), _ms(waits), what)
            )
        return rows

    def _layouts_of(self, module: str) -> str:
        parts = []
        for name in self._steps.owners.get(module, ()):
            entry = self.config.spec_for(name)
            if entry is not None:
                parts.append(f"{name.rpartition('.')[2]} {dims_text(entry.dims)}")
        output = self.config.output_for(module)
        return " ".join([*parts, *([f"-> {dims_text(output.dims)}"] if output is not None else [])])

    def __str__(self) -> str:
        header = ("module", "layouts", "compute", "waits", "communication")
        rows = [header, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = [_aligned(row, widths) for row in rows]
        compared = [f"  {_candidate_text(each)}" for each in self.candidates]
        inputs = f"inputs {dims_text(self.config.inputs or ())}"
        return "\n".join([self._heading(), inputs, "", *table, "", "compared:", *dict.fromkeys(compared)])

    def __repr__(self) -> str:
        return f"<Plan {_summary(self)}>"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        cells = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows()]
        heads = "".join(f"<th>{name}</th>" for name in ("module", "layouts", "compute", "waits", "communication"))
        heading = html.escape(self._heading()).replace("\n", "<br>")
        return f"<p>{heading}</p><table><tr>{heads}</tr>{''.join(cells)}</table>"


def _differences(mine: Mapping[str, str], others: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The two layouts of each name whose layouts differ, by patterns of names."""
    names = dict.fromkeys((*mine, *others))
    both = {name: (mine.get(name, _NO_LAYOUT), others.get(name, _NO_LAYOUT)) for name in names}
    return as_patterns({name: pair for name, pair in both.items() if pair[0] != pair[1]}, names)


def _entry_text(entry: ParameterEntry | OutputEntry | None) -> str:
    return _NO_LAYOUT if entry is None else dims_text(entry.dims)


def _closed(spec: ShardingSpec) -> Constraint:
    return Constraint(spec.mesh, tuple([DimConstraint(axes, is_open=False) for axes in spec.dims]))


def _is_of(module: str, pattern: str) -> bool:
    """Whether a pattern names a module, or a parameter of it."""
    owner = pattern.rpartition(".")[0]
    return fnmatch.fnmatchcase(module, pattern) or (bool(owner) and fnmatch.fnmatchcase(module, owner))


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    left = "  ".join([cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)])
    right = "  ".join([cell.rjust(width) for cell, width in zip(row[2:4], widths[2:], strict=False)])
    return f"{left}  {right}  {row[4]}".rstrip()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _summary(plan: Plan) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    return (
        f"{axes}: {_ms(plan.cost)} a step, {print_bytes(plan.bytes)} received by all workers, "
        f"{print_bytes(plan.memory)} on a worker"
    )


def _candidate_text(candidate: Candidate) -> str:
    shape = "x".join(map(str, candidate.mesh.shape))
    cost = candidate.cost
    received, held = print_bytes(cost.nbytes), print_bytes(cost.peak)
    return f"{shape:<6} {candidate.origin:<14} {_ms(cost.seconds):>12} {received:>10} {held:>10}"
