"""Searches for the fastest layouts of recorded steps: the solver proposes layouts for each mesh, and the ordinary
planner, in a replay of the steps, tells what they and a few standard ones cost."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gt.core.errors import LayoutError
from gt.dispatcher.step_replay import ReplayedStep, replay_steps
from gt.sharding.calibration import Calibration
from gt.sharding.host_order import mesh_of_workers, order_workers
from gt.sharding.solver.name_patterns import as_patterns
from gt.sharding.solver.pairwise_model import Assignment
from gt.sharding.solver.recorded_program import INPUT, OUTPUT, RecordedProgram, RecordedSteps
from gt.sharding.solver.simple_solver import FAST, SimpleSolver, Solution
from gt.sharding.solver.strategy_graph import MergedModel, StrategyGraph, alike, build_graph
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.signals.config import AxesPerDim, ModelConfig, OutputEntry, ParameterEntry
from gt.signals.resolution import resolve_activation, resolve_spec

SOLVER, DATA_PARALLEL, FULLY_SHARDED, REFINED = "solver", "data parallel", "fully sharded", "refined"
MERGED_FROM = 1500  # variables from which repeated blocks are merged
_TRIES = 3  # tries to stay within memory: the replay also counts copies
_MARGIN = 0.95
_BETTER = 1 - 1e-6
_FREQUENT = 3  # patterns with the same layout


class Candidate(NamedTuple):
    """Layouts on a mesh, what proposed them, and what they cost. `bound` is a lower bound of the solver's model."""

    mesh: DeviceMesh
    config: ModelConfig
    origin: str
    cost: ReplayedStep
    solution: Solution | None


class PlanSearch:
    """Searches for the fastest layouts of recorded steps on `hosts`, those of the connected workers. `fixed` are
    layouts that the user has given: all candidates have them. `limit` are bytes of a worker (None: no limit)."""

    def __init__(
        self,
        steps: RecordedSteps,
        program: RecordedProgram,
        hosts: Mapping[int, str],
        machine: Calibration,
        limit: int | None,
        fixed: ModelConfig | None,
        solver: SimpleSolver,
        progress: Callable[[str], None],
    ) -> None:
        self._steps = steps
        self._program = program
        self._hosts = hosts
        self._machine = machine
        self._limit = limit
        self._fixed = fixed
        self._solver = solver
        self._fast = SimpleSolver(FAST)
        self._progress = progress
        self._costs: dict[tuple[DeviceMesh, ModelConfig], ReplayedStep] = {}

    def candidates(self, mesh: DeviceMesh) -> list[Candidate]:
        """The candidates on a mesh, the fastest first."""
        found = [self.evaluate(mesh, config, origin) for origin, config in self._standard(mesh)]
        fixed, overlap = self._fixed_layouts(mesh), self._machine.overlap
        for hidden in (overlap, 0.0) if overlap else (0.0,):  # backward may be too short to hide all reductions
            found += self._solved(mesh, build_graph(self._program, mesh, self._machine, fixed, hidden))
        for each in found:
            self._progress(f"{_shape(mesh)}: {each.origin}: {each.cost.seconds * 1e3:.3f} ms")
        return sorted(found, key=lambda each: each.cost.seconds)

    def _solved(self, mesh: DeviceMesh, graph: StrategyGraph) -> list[Candidate]:
        """What the solver proposes for a choice problem. The replay tells which of that is within the limit of memory:
        the solver's own sum of memory may be larger or smaller. If the fastest proposal is not, the solver is given
        that limit too, and less of it while the replay exceeds it."""
        self._progress(f"{_shape(mesh)}: {len(graph.variables)} variables, {len(graph.model.pairs)} pairs")
        found = list(self._proposed(mesh, graph, None))
        if self._limit is None or self.fits(min(found, key=lambda each: each.cost.seconds)):
            return found
        found = [each._replace(solution=None) for each in found]  # its lower bound ignores the memory limit
        limit = float(self._limit)
        for _ in range(_TRIES):
            proposed = list(self._proposed(mesh, graph, limit))
            found += proposed
            if not proposed or any(map(self.fits, proposed)):
                break
            limit *= _MARGIN * self._limit / min(each.cost.peak for each in proposed)
        return found

    def refine(self, candidates: Sequence[Candidate], seconds: float) -> Candidate:
        """The fastest candidate within memory, improved: entries are left out or taken from other candidates as long as
        that makes the replayed step faster, for some seconds. If none is within memory, the smallest one is first made
        smaller in the same way."""
        deadline = time.monotonic() + seconds
        fitting = list(filter(self.fits, candidates))
        if not fitting:
            smallest = min(candidates, key=lambda each: each.cost.peak)
            fitting = [self._improve(smallest, candidates, lambda each: each.peak, deadline, self.fits)]
        fastest = min(fitting, key=lambda each: each.cost.seconds)
        return (
            self._improve(fastest, candidates, lambda each: each.seconds, deadline) if self.fits(fastest) else fastest
        )

    def _improve(
        self,
        best: Candidate,
        candidates: Sequence[Candidate],
        measure: Callable[[ReplayedStep], float],
        deadline: float,
        is_enough: Callable[[Candidate], bool] = lambda _: False,
    ) -> Candidate:
        others = [each.config for each in candidates if each.mesh is best.mesh and each.config is not best.config]
        must_fit, is_improved = self.fits(best), True
        while is_improved and not is_enough(best):
            is_improved = False
            for config in (*self._without_module(best.config), *_variants(best.config, others)):
                if time.monotonic() > deadline:
                    return best
                tried = self.evaluate(best.mesh, self._with_fixed(config), REFINED, best.solution)
                if (self.fits(tried) or not must_fit) and measure(tried.cost) < measure(best.cost) * _BETTER:
                    self._progress(f"{_shape(best.mesh)}: {REFINED}: {tried.cost.seconds * 1e3:.3f} ms")
                    best, is_improved = tried, True
                    break
        return best

    def _without_module(self, config: ModelConfig) -> Iterator[ModelConfig]:
        """Configurations without an entry of parameters, those of parameters tied to them, and those of the results of
        their modules: one of these alone may cost more than none."""
        parameters = self._steps.parameters
        for entry in config.parameters:
            idents = {ident for name, ident in parameters.items() if config.spec_for(name) is entry}
            names = [name for name, ident in parameters.items() if ident in idents]
            gone = [config.spec_for(name) for name in names]
            results = [config.output_for(name.rpartition(".")[0]) for name in names]
            yield _changed(
                config,
                [own for own in config.parameters if own not in gone],
                [own for own in config.outputs if own not in results],
                config.inputs,
            )

    def _with_fixed(self, config: ModelConfig) -> ModelConfig:
        """A configuration with the user's own layouts at its end."""
        own = self._fixed
        if own is None:
            return config
        parameters = [entry for entry in config.parameters if entry not in own.parameters]
        outputs = [entry for entry in config.outputs if entry not in own.outputs]
        return _changed(config, [*parameters, *own.parameters], [*outputs, *own.outputs], own.inputs or config.inputs)

    def fits(self, candidate: Candidate) -> bool:
        return self._limit is None or candidate.cost.peak <= self._limit

    def evaluate(
        self, mesh: DeviceMesh, config: ModelConfig, origin: str, solution: Solution | None = None
    ) -> Candidate:
        """The cost of layouts, by a replay. Entries that decide about nothing are left out."""
        config = self._used(config)
        cost = self._costs.get((mesh, config))
        if cost is None:
            cost = self._costs[mesh, config] = replay_steps(self._steps, config, mesh, len(self._hosts), self._machine)
        return Candidate(mesh, config, origin, cost, solution)

    def _used(self, config: ModelConfig) -> ModelConfig:
        modules = {boundary.module for boundary in self._program.boundaries}
        parameters = {entry for name in self._steps.parameters if (entry := config.spec_for(name)) is not None}
        outputs = {output for name in modules if (output := config.output_for(name)) is not None}
        return _changed(
            config,
            [entry for entry in config.parameters if entry in parameters],
            [entry for entry in config.outputs if entry in outputs],
            config.inputs,
        )

    # Proposals

    def _proposed(self, mesh: DeviceMesh, graph: StrategyGraph, limit: float | None) -> Iterator[Candidate]:
        """The layouts that the solver proposes: the best ones and, for a program that is not large, the best for each
        way to cut the batch. Each with those of activations, and with those of parameters alone."""
        limits = () if limit is None else (limit,) * graph.model.limits
        best = self._solve(graph, limits, None)
        cuts = self._batch_cuts(mesh, graph) if len(graph.variables) < MERGED_FROM else ()
        found = [best, *[self._solve(graph, limits, kept) for kept in cuts]]
        for solution in [each for each in found if each is not None]:
            parameters = self._parameter_entries(graph, solution.chosen)
            inputs = self._inputs(graph, solution.chosen)
            outputs = self._output_entries(graph, solution.chosen)
            for own in (outputs, {}):
                yield self.evaluate(mesh, self._config(mesh, parameters, inputs, own), SOLVER, best)

    def _batch_cuts(self, mesh: DeviceMesh, graph: StrategyGraph) -> Iterator[dict[int, int]]:
        """For each set of axes along which the inputs of the model can be cut, the choices of their variables."""
        values = {each.value for each in self._program.boundaries if each.kind == INPUT and each.value in graph.stored}
        axes = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
        subsets = [chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)]
        for chosen in subsets if values else ():
            kept: dict[int, int] = {}
            for variable in [graph.stored[value] for value in values]:
                for choice, (spec,) in enumerate(graph.variables[variable].layouts):
                    if spec.dims and spec.dims[0] == chosen and not any(spec.dims[1:]):
                        kept[variable] = choice
            if len(kept) == len(values):
                yield kept

    def _solve(self, graph: StrategyGraph, limits: Sequence[float], kept: Mapping[int, int] | None) -> Solution | None:
        """The solver's answer; with some choices `kept`, that of its fast method."""
        model, solver = graph.model, self._solver if kept is None else self._fast
        every = [
            [kept[variable]] if kept and variable in kept else list(range(len(costs)))
            for variable, costs in enumerate(model.unary)
        ]
        if kept:
            model = model.restricted(every)
        classes = alike(graph) if len(model.unary) >= MERGED_FROM else None
        merged = MergedModel(model, classes) if classes is not None else None
        solution = solver.solve(model if merged is None else merged.model, limits)
        if solution is None:
            return None
        chosen = solution.chosen if merged is None else merged.complete(solution.chosen)
        return solution._replace(chosen=[own[choice] for own, choice in zip(every, chosen, strict=True)])

    def _standard(self, mesh: DeviceMesh) -> Iterator[tuple[str, ModelConfig]]:
        """Data parallel, and fully sharded: each parameter is cut along its largest dim."""
        axes = tuple([axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1])
        batch: AxesPerDim = (axes, "...")
        yield DATA_PARALLEL, self._config(mesh, {}, batch, {})
        layouts: dict[str, AxesPerDim] = {}
        for name, ident in self._steps.parameters.items():
            shape = self._steps.metas[ident].shape if ident in self._steps.metas else ()
            if shape and max(shape) >= mesh.size:
                layouts[name] = tuple([axes if dim == shape.index(max(shape)) else () for dim in range(len(shape))])
        yield FULLY_SHARDED, self._config(mesh, as_patterns(layouts, self._steps.parameters), batch, {"*": batch})

    def _config(
        self,
        mesh: DeviceMesh,
        parameters: Mapping[str, AxesPerDim],
        inputs: AxesPerDim,
        outputs: Mapping[str, AxesPerDim],
    ) -> ModelConfig:
        """A configuration with the user's own layouts after those that are proposed: the last pattern counts."""
        own = self._fixed or ModelConfig()
        sizes = tuple(zip(mesh.axis_names, mesh.shape, strict=True))
        return ModelConfig(
            sizes,
            mesh.workers if mesh.workers != order_workers(mesh.shape, self._hosts) else None,
            [*[ParameterEntry(pattern, dims) for pattern, dims in parameters.items()], *own.parameters],
            inputs=inputs if own.inputs is None else own.inputs,  # type: ignore[arg-type]
            outputs=[*[OutputEntry(pattern, dims) for pattern, dims in outputs.items()], *own.outputs],
        )

    # From layouts of values to entries

    def _parameter_entries(self, graph: StrategyGraph, chosen: Assignment) -> dict[str, AxesPerDim]:
        layouts: dict[str, AxesPerDim] = {}
        for value, names in self._program.names.items():
            spec = graph.layout(value, chosen)
            if spec is not None and any(spec.dims):
                layouts.update(dict.fromkeys(names, spec.dims))
        return as_patterns(layouts, self._steps.parameters)

    def _inputs(self, graph: StrategyGraph, chosen: Assignment) -> AxesPerDim:
        """The layout of the model's inputs: that of the largest one."""
        own = [boundary for boundary in self._program.boundaries if boundary.kind == INPUT]
        own.sort(key=lambda boundary: -self._program.values[boundary.view].nbytes)
        specs = [spec for boundary in own if (spec := graph.layout(boundary.view, chosen)) is not None]
        dims = list(specs[0].dims) if specs else []
        while dims and not dims[-1]:
            dims.pop()
        return (*dims, "...")

    def _output_entries(self, graph: StrategyGraph, chosen: Assignment) -> dict[str, AxesPerDim]:
        """The layouts of results. Modules that have the most frequent one share the pattern `*`, if no other module
        would get it by that."""
        own = [each for each in self._program.boundaries if each.kind == OUTPUT and each.module]
        layouts: dict[str, AxesPerDim] = {}
        for boundary in own:
            spec = graph.layout(boundary.view, chosen)
            if spec is not None and spec.dims and not spec.partial:
                layouts.setdefault(boundary.module, spec.dims)
        names = list(dict.fromkeys([boundary.module for boundary in own]))
        patterns = as_patterns(layouts, names)
        frequent, count = Counter(patterns.values()).most_common(1)[0] if patterns else ((), 0)
        free = [each for each in own if each.module not in layouts and self._rank(each.view) == len(frequent)]
        if count < _FREQUENT or free:
            return patterns
        return {"*": frequent} | {pattern: dims for pattern, dims in patterns.items() if dims != frequent}

    def _rank(self, value: str) -> int:
        return len(self._program.values[value].shape)

    # Layouts that the user has given

    def _fixed_layouts(self, mesh: DeviceMesh) -> dict[str, ShardingSpec]:
        own = self._fixed
        if own is None:
            return {}
        check_mesh(own, mesh)
        found: dict[str, ShardingSpec] = {}
        for value, names in self._program.names.items():
            entries = [entry for name in names if (entry := own.spec_for(name)) is not None]
            if entries:
                found[value] = resolve_spec(entries[-1].dims, mesh, len(self._program.values[value].shape))
        for boundary in self._program.boundaries:
            output = own.output_for(boundary.module) if boundary.kind != INPUT else None
            dims = own.inputs if boundary.kind == INPUT else output.dims if output is not None else None
            shape = self._program.values[boundary.view].shape
            spec = None if dims is None else resolve_activation(dims, mesh, shape)
            if spec is not None:
                found[boundary.view] = spec
        return found


def _variants(config: ModelConfig, others: Sequence[ModelConfig]) -> Iterator[ModelConfig]:
    """Configurations that differ from one in a single entry: it is left out, or is as in another configuration."""
    for position in range(len(config.parameters)):
        kept = [entry for number, entry in enumerate(config.parameters) if number != position]
        yield _changed(config, kept, config.outputs, config.inputs)
    for position in range(len(config.outputs)):
        kept_outputs = [entry for number, entry in enumerate(config.outputs) if number != position]
        yield _changed(config, config.parameters, kept_outputs, config.inputs)
    for other in others:
        for entry in other.parameters:
            if entry not in config.parameters:
                yield _changed(config, [*config.parameters, entry], config.outputs, config.inputs)
        for output in other.outputs:
            if output not in config.outputs:
                yield _changed(config, config.parameters, [*config.outputs, output], config.inputs)
        if other.inputs != config.inputs:
            yield _changed(config, config.parameters, config.outputs, other.inputs)


def _changed(
    config: ModelConfig,
    parameters: Sequence[ParameterEntry],
    outputs: Sequence[OutputEntry],
    inputs: AxesPerDim | None,
) -> ModelConfig:
    """A configuration with other entries; of entries with the same pattern the last one."""
    own = {entry.pattern: entry for entry in parameters}
    results = {entry.pattern: entry for entry in outputs}
    return ModelConfig(config.mesh, config.workers, own.values(), inputs=inputs, outputs=results.values())  # type: ignore[arg-type]


def check_mesh(config: ModelConfig, mesh: DeviceMesh) -> None:
    """Raise LayoutError if a configuration names another mesh."""
    if config.mesh is not None and config.mesh != tuple(zip(mesh.axis_names, mesh.shape, strict=True)):
        named = ", ".join(f"{name}: {size}" for name, size in config.mesh)
        raise LayoutError(
            f"the given layouts are on the mesh {{{named}}}, and the plan is for {mesh}; plan for the same mesh"
        )


def _shape(mesh: DeviceMesh) -> str:
    return "x".join(map(str, mesh.shape))


def candidate_meshes(hosts: Mapping[int, str], *, are_axes_alike: bool = True) -> list[DeviceMesh]:
    """The grids of two axes over workers, which are given by their hosts. Grids whose axes are exchanged cost the same
    if the axes are alike; then the first axis is not larger than the second. On several hosts the axes of a row are
    alike, and those of other grids are not."""
    count, is_one_host = len(hosts), len(set(hosts.values())) == 1
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    if are_axes_alike:
        sizes = [size for size in sizes if (size * size <= count if is_one_host else size == 1 or size < count)]
    shapes = [(size, count // size) for size in sizes]
    return [mesh_of_workers(shape, ("dp", "tp"), order_workers(shape, hosts), hosts) for shape in shapes]
