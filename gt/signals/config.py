"""The records of a configuration: immutable, comparable, and checked whether made in Python or from YAML."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Literal, TypeAlias

from gt.core.errors import SignalError
from gt.core.tables import html_table
from gt.core.tracebacks import ends_on_users_line, with_init_on_users_line
from gt.signals.checks import (
    ALL,
    INPUTS,
    NOT_CUT,
    OUTPUTS,
    REST,
    Problem,
    dims_problems,
    is_list,
    memory_problems,
    mesh_axes,
    name_problem,
    pairs_of,
    pattern_problems,
    shard_problems,
    show,
    worker_problems,
)

__all__ = [
    "REST",
    "AxesPerDim",
    "Config",
    "Mesh",
    "ModelConfig",
    "ModuleEntry",
    "OutputEntry",
    "ParameterEntry",
    "ShardConfig",
    "SignalConfig",
    "at",
]

Mesh: TypeAlias = tuple[tuple[str, int], ...]
"""The axes of a mesh and their sizes, major to minor."""

AxesPerDim: TypeAlias = tuple[tuple[str, ...] | Literal["..."], ...]
"""Per dim, the axes that cut it, major to minor; `...` is any number of dims that are not cut."""

Workers: TypeAlias = tuple[int, ...] | Literal["all"] | None
"""The ids of workers, or all that are connected. None: all, or the first ones of a grid."""

MeshArgument: TypeAlias = Mapping[str, int] | Sequence[tuple[str, int]]
DimsArgument: TypeAlias = Sequence[str | Sequence[str] | None]


@dataclass(frozen=True, init=False)
class ShardConfig:
    """How the tensors of a scope are laid out. One of `axis`, `dims` and `replicate` is given.

    - `axis`: the tensor dim to cut
    - `workers`: over which workers; None: all, or as many as the mesh has; "all": all, with as many places along the
      first axis of the mesh as there are workers for
    - `mesh`: the axes of a grid of workers and their sizes, for `dims`
    - `dims`: for each tensor dim, the axis of the mesh that cuts it, several axes, or None
    - `replicate`: the whole tensor on each worker

    >>> gt.ShardConfig(axis=0, workers=[0, 1]).workers
    (0, 1)
    >>> gt.ShardConfig(mesh={"dp": 2, "tp": 2}, dims=["dp", None]).dims
    (('dp',), ())
    >>> gt.ShardConfig(replicate=True).replicate
    True
    """

    axis: int | None
    workers: Workers
    mesh: Mesh | None
    dims: AxesPerDim | None
    replicate: bool

    @ends_on_users_line
    def __init__(
        self,
        axis: int | None = None,
        workers: Sequence[int] | Literal["all"] | None = None,
        mesh: MeshArgument | None = None,
        dims: DimsArgument | None = None,
        replicate: bool = False,
    ) -> None:
        _raise_problems("ShardConfig", shard_problems(axis, workers, mesh, dims, replicate))
        _set_fields(
            self,
            axis=None if axis is None else operator.index(axis),
            workers=_workers(workers),
            mesh=_mesh(mesh),
            dims=None if dims is None else normalise_dims(dims),
            replicate=replicate,
        )


@with_init_on_users_line
@dataclass(frozen=True)
class SignalConfig:
    """The configuration of a signal.

    - `shard`: how tensors of the scope are laid out; None: as outside of it
    - `backward_signal`: the signal of the gradients, by default the same one
    - `compile`: whether workers compile the ops of the scope
    - `source`: the file and line of the configuration; empty for Python
    - `reshard_after_forward`: whether gathered parameters are dropped when a module has run in the scope; None: as
      around the scope

    >>> rows = gt.ShardConfig(axis=0)
    >>> config = gt.SignalConfig(shard=rows, backward_signal="backward", compile=True)
    >>> config.shard.axis, config.backward_signal, config.compile
    (0, 'backward', True)
    >>> gt.SignalConfig(reshard_after_forward=False).reshard_after_forward, config.source
    (False, '')
    """

    shard: ShardConfig | None = None
    backward_signal: str | None = None
    compile: bool = False
    source: str = field(default="", compare=False)
    reshard_after_forward: bool | None = None

    def __post_init__(self) -> None:
        _raise_problems("SignalConfig", self._problems())

    def _repr_html_(self) -> str:
        rows = [(name.name, repr(getattr(self, name.name))) for name in fields(self) if name.name != "source"]
        return html_table(f"SignalConfig {self.source}".strip(), ("key", "value"), rows)

    def _problems(self) -> Iterator[Problem]:
        if self.shard is not None and not isinstance(self.shard, ShardConfig):
            yield Problem((), f"shard has to be a ShardConfig such as ShardConfig(axis=0), not {show(self.shard)}")
        if self.backward_signal is not None and (text := name_problem(self.backward_signal, "backward_signal")):
            yield Problem((), text)
        if not isinstance(self.compile, bool):
            yield Problem((), f"compile has to be True or False, not {show(self.compile)}")
        reshards = self.reshard_after_forward
        if reshards is not None and not isinstance(reshards, bool):
            yield Problem((), f"reshard_after_forward has to be True, False or None, not {show(reshards)}")


@dataclass(frozen=True)
class ParameterEntry:
    """The layout of parameters and buffers whose name matches the pattern."""

    pattern: str
    dims: AxesPerDim
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class ModuleEntry:
    """The signal in whose scope modules run if their name matches the pattern."""

    pattern: str
    signal: str
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class OutputEntry:
    """The layout of the results of modules whose name matches the pattern, and of the gradients of these results."""

    pattern: str
    dims: AxesPerDim
    source: str = field(default="", compare=False)


@dataclass(frozen=True, init=False)
class ModelConfig:
    """The layout of a model, by the names of its parameters and modules: the section `model` of a YAML file. Patterns
    are those of `fnmatch`, in which `*` matches dots too. If several match a name, the last one counts.

    - `mesh`: the axes of a grid of workers and their sizes
    - `workers`: the workers of the grid; None: the first ones; "all": all, with as many places along the first axis as
      there are workers for
    - `parameters`: by pattern, for each tensor dim the axis that cuts it
    - `modules`: by pattern, the signal in whose scope modules run
    - `source`: the file and line of the configuration; empty for Python
    - `inputs`: the layout of the tensors that the model is called with; None: as they are
    - `outputs`: by pattern, the layout of the results of modules and of their gradients
    - `eager_memory`: the bytes of a worker within which an eager step is planned; None: no limit, or a compiled step

    >>> model = gt.ModelConfig(mesh={"tp": 2}, parameters={"*.weight": ["tp", None]}, modules={"layers.0": "first"})
    >>> model.spec_for("layers.0.weight").dims, model.scope_for("layers.0.mlp").signal
    ((('tp',), ()), 'first')
    """

    mesh: Mesh | None
    workers: Workers
    parameters: tuple[ParameterEntry, ...]
    modules: tuple[ModuleEntry, ...]
    source: str = field(compare=False)
    inputs: AxesPerDim | None
    outputs: tuple[OutputEntry, ...]
    eager_memory: int | None = field(compare=False)

    @ends_on_users_line
    def __init__(
        self,
        mesh: MeshArgument | None = None,
        workers: Sequence[int] | Literal["all"] | None = None,
        parameters: Mapping[str, DimsArgument] | Iterable[ParameterEntry] = (),
        modules: Mapping[str, str] | Iterable[ModuleEntry] = (),
        source: str = "",
        inputs: DimsArgument | None = None,
        outputs: Mapping[str, DimsArgument] | Iterable[OutputEntry] = (),
        eager_memory: int | None = None,
    ) -> None:
        if isinstance(parameters, Mapping):
            parameters = [ParameterEntry(pattern, dims) for pattern, dims in parameters.items()]  # type: ignore[arg-type]
        if isinstance(modules, Mapping):
            modules = [ModuleEntry(pattern, signal) for pattern, signal in modules.items()]
        if isinstance(outputs, Mapping):
            outputs = [OutputEntry(pattern, dims) for pattern, dims in outputs.items()]  # type: ignore[arg-type]
        parameters, modules, outputs = tuple(parameters), tuple(modules), tuple(outputs)
        problems = model_problems(mesh, workers, parameters, modules, inputs, outputs, eager_memory)
        _raise_problems("ModelConfig", problems)
        _set_fields(
            self,
            mesh=_mesh(mesh),
            workers=_workers(workers),
            parameters=tuple([ParameterEntry(e.pattern, normalise_dims(e.dims), e.source) for e in parameters]),
            modules=modules,
            source=source,
            inputs=None if inputs is None else normalise_dims(inputs),
            outputs=tuple([OutputEntry(e.pattern, normalise_dims(e.dims), e.source) for e in outputs]),
            eager_memory=eager_memory,
        )

    def spec_for(self, name: str) -> ParameterEntry | None:
        """The entry for a parameter or buffer."""
        return next((entry for entry in reversed(self.parameters) if fnmatch.fnmatchcase(name, entry.pattern)), None)

    def output_for(self, name: str) -> OutputEntry | None:
        """The entry for the results of a module."""
        return next((entry for entry in reversed(self.outputs) if fnmatch.fnmatchcase(name, entry.pattern)), None)

    def scope_for(self, name: str) -> ModuleEntry | None:
        """The entry for a module. An entry also applies to the modules inside, unless a later pattern matches them."""
        around = [name, *[name[: match.start()] for match in re.finditer(r"\.", name)], ""]
        return next(
            (e for e in reversed(self.modules) if any(fnmatch.fnmatchcase(each, e.pattern) for each in around)), None
        )


@dataclass(frozen=True)
class Config:
    """A configuration: signals by name, and the layout of a model."""

    signals: Mapping[str, SignalConfig] = field(default_factory=dict)
    model: ModelConfig | None = None

    def __post_init__(self) -> None:
        _set_fields(self, signals=MappingProxyType(dict(self.signals)))


def model_problems(
    mesh: object,
    workers: object,
    parameters: Sequence[ParameterEntry],
    modules: Sequence[ModuleEntry],
    inputs: object = None,
    outputs: Sequence[OutputEntry] = (),
    eager_memory: object = None,
) -> Iterator[Problem]:
    """The problems of the arguments of a ModelConfig. The path of an entry begins with its pattern, that of an output
    with `outputs` before it."""
    yield from worker_problems(workers, mesh)
    axes = mesh_axes(mesh)
    for parameter in parameters:
        yield from pattern_problems(parameter.pattern)
        yield from dims_problems((parameter.pattern,), parameter.dims, axes)
    for module in modules:
        yield from pattern_problems(module.pattern)
        if text := name_problem(module.signal, f"the signal of modules {show(module.pattern)}"):
            yield Problem((module.pattern,), text)
    if inputs is not None:
        yield from dims_problems((INPUTS,), inputs, axes)
    for output in outputs:
        for path, text in pattern_problems(output.pattern):
            yield Problem((OUTPUTS, *path), text)
        yield from dims_problems((OUTPUTS, output.pattern), output.dims, axes)
    yield from memory_problems(eager_memory)


def at(source: str) -> str:
    """The beginning of an error message about a section of a file; empty for Python."""
    return f"{source}: " if source else ""


def normalise_dims(dims: DimsArgument) -> AxesPerDim:
    return tuple([_dim(dim) for dim in dims])


def _dim(dim: str | Sequence[str] | None) -> tuple[str, ...] | Literal["..."]:
    if dim is None or dim == NOT_CUT:
        return ()
    if dim == REST:
        return "..."
    return (dim,) if isinstance(dim, str) else tuple(dim)


def _mesh(mesh: MeshArgument | None) -> Mesh | None:
    return None if mesh is None else tuple([(str(name), operator.index(size)) for name, size in pairs_of(mesh) or ()])  # type: ignore[arg-type]


def _workers(workers: Sequence[int] | str | None) -> Workers:
    if workers == ALL:
        return ALL
    return tuple([operator.index(worker) for worker in workers]) if is_list(workers) else None  # type: ignore[arg-type]


def _set_fields(record: object, **fields: object) -> None:
    """Set fields of a frozen record while it is constructed."""
    for name, value in fields.items():
        object.__setattr__(record, name, value)


def _raise_problems(what: str, problems: Iterable[Problem]) -> None:
    found = [f"{what}: {problem.text}" for problem in problems]
    if found:
        raise SignalError("\n".join(found))
