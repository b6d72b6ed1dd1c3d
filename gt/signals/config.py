"""The records of a configuration: immutable, comparable, and checked whether made in Python or from YAML."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from gt.core.errors import SignalError
from gt.signals.checks import (
    NOT_CUT,
    REST,
    Problem,
    dims_problems,
    is_list,
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
    "ParameterEntry",
    "ShardConfig",
    "SignalConfig",
    "at",
]

Mesh: TypeAlias = tuple[tuple[str, int], ...]
"""The axes of a mesh and their sizes, major to minor."""

AxesPerDim: TypeAlias = tuple[tuple[str, ...] | Literal["..."], ...]
"""Per dim, the axes that cut it, major to minor; `...` is any number of dims that are not cut."""

MeshArgument: TypeAlias = Mapping[str, int] | Sequence[tuple[str, int]]
DimsArgument: TypeAlias = Sequence[str | Sequence[str] | None]


@dataclass(frozen=True, init=False)
class ShardConfig:
    """How the tensors of a scope are laid out, and over which workers (None: all).

    One of: `axis`, a tensor dim to cut; `dims`, which axes of `mesh` cut which dim; `replicate`, the whole on each.
    """

    axis: int | None
    workers: tuple[int, ...] | None
    mesh: Mesh | None
    dims: AxesPerDim | None
    replicate: bool

    def __init__(
        self,
        axis: int | None = None,
        workers: Sequence[int] | None = None,
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


@dataclass(frozen=True)
class SignalConfig:
    """The configuration of a signal. `backward_signal` is the signal of its gradients, by default the same one.
    `reshard_after_forward`: whether gathered parameters are dropped when a module has run in the scope (None: as around
    the scope). `source` is the file and line of the configuration, or empty for Python."""

    shard: ShardConfig | None = None
    backward_signal: str | None = None
    compile: bool = False
    source: str = field(default="", compare=False)
    reshard_after_forward: bool | None = None

    def __post_init__(self) -> None:
        _raise_problems("SignalConfig", self._problems())

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


@dataclass(frozen=True, init=False)
class ModelConfig:
    """The layout of a model, by the names of its parameters and modules. Patterns are those of `fnmatch`, in which `*`
    matches dots too. If several match a name, the last one counts."""

    mesh: Mesh | None
    workers: tuple[int, ...] | None
    parameters: tuple[ParameterEntry, ...]
    modules: tuple[ModuleEntry, ...]
    source: str = field(compare=False)

    def __init__(
        self,
        mesh: MeshArgument | None = None,
        workers: Sequence[int] | None = None,
        parameters: Mapping[str, DimsArgument] | Iterable[ParameterEntry] = (),
        modules: Mapping[str, str] | Iterable[ModuleEntry] = (),
        source: str = "",
    ) -> None:
        if isinstance(parameters, Mapping):
            parameters = [ParameterEntry(pattern, dims) for pattern, dims in parameters.items()]  # type: ignore[arg-type]
        if isinstance(modules, Mapping):
            modules = [ModuleEntry(pattern, signal) for pattern, signal in modules.items()]
        parameters, modules = tuple(parameters), tuple(modules)
        _raise_problems("ModelConfig", model_problems(mesh, workers, parameters, modules))
        _set_fields(
            self,
            mesh=_mesh(mesh),
            workers=_workers(workers),
            parameters=tuple([ParameterEntry(e.pattern, normalise_dims(e.dims), e.source) for e in parameters]),
            modules=modules,
            source=source,
        )

    def spec_for(self, name: str) -> ParameterEntry | None:
        """The entry for a parameter or buffer."""
        return next((entry for entry in reversed(self.parameters) if fnmatch.fnmatchcase(name, entry.pattern)), None)

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
    mesh: object, workers: object, parameters: Sequence[ParameterEntry], modules: Sequence[ModuleEntry]
) -> Iterator[Problem]:
    """The problems of the arguments of a ModelConfig. The path of an entry begins with its pattern."""
    yield from worker_problems(workers, mesh)
    axes = mesh_axes(mesh)
    for parameter in parameters:
        yield from pattern_problems(parameter.pattern)
        yield from dims_problems((parameter.pattern,), parameter.dims, axes)
    for module in modules:
        yield from pattern_problems(module.pattern)
        if text := name_problem(module.signal, f"the signal of modules {show(module.pattern)}"):
            yield Problem((module.pattern,), text)


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


def _workers(workers: Sequence[int] | None) -> tuple[int, ...] | None:
    return tuple([operator.index(worker) for worker in workers]) if is_list(workers) else None  # type: ignore[arg-type]


def _set_fields(record: object, **fields: object) -> None:
    """Set fields of a frozen record while it is constructed."""
    for name, value in fields.items():
        object.__setattr__(record, name, value)


def _raise_problems(what: str, problems: Iterable[Problem]) -> None:
    found = [f"{what}: {problem.text}" for problem in problems]
    if found:
        raise SignalError("\n".join(found))
