"""The layouts that the `model` section of a configuration gives to the tensors of a model, by their names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gt.client import active_session
from gt.core.errors import SignalError
from gt.core.messages import hosts_of
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.signals.checks import REST
from gt.signals.config import ModelConfig, at
from gt.signals.registry import registry
from gt.signals.resolution import resolve_mesh, resolve_spec, resolve_whole


class NamedLayouts:
    """The layouts of a `model` section for the connected workers. `mesh` is that of the section, if it names one: then
    every tensor is laid out on it, as its pattern says, or else whole on each worker. Without one, tensors are laid out
    for the scopes in which their modules run, if these cut nothing but batches."""

    def __init__(self, config: ModelConfig, mesh: DeviceMesh | None) -> None:
        self.config = config
        self.mesh = mesh
        self._connected = hosts_of(active_session.current().workers)

    @classmethod
    def of(cls, config: ModelConfig) -> NamedLayouts:
        if config.mesh is None and config.workers is None:
            return cls(config, None)
        connected = hosts_of(active_session.current().workers)
        return cls(config, resolve_mesh(config.mesh, config.workers, connected, f"{at(config.source)}model"))

    @classmethod
    def current(cls) -> NamedLayouts | None:
        """Those of the present configuration; None without a `model` section, and on the embedded worker, where layouts
        are ignored."""
        config = registry.current().model
        return None if config is None or active_session.current().embedded else cls.of(config)

    def spec(self, names: Sequence[str], tensor: torch.Tensor) -> ShardingSpec | None:
        """The layout of a tensor with these names; None if its first use decides. Raises SignalError if the section
        contradicts itself, or the shape."""
        found = [(name, entry) for name in names if (entry := self.config.spec_for(name)) is not None]
        if self.mesh is None:
            return next((spec for name in names if (spec := self._of_scope(name, tensor.dim())) is not None), None)
        if not found:
            return whole(self.mesh, tensor.dim())
        name, entry = found[0]
        for other, also in found[1:]:
            if also.dims != entry.dims:
                raise SignalError(
                    f"{at(entry.source)}{entry.pattern!r} and {also.pattern!r} lay out one tied parameter in two ways: "
                    f"{name} and {other}; give both the same layout"
                )
        named = len([dim for dim in entry.dims if dim != REST])
        if named > tensor.dim():
            raise SignalError(
                f"{at(entry.source)}{entry.pattern!r} names {named} dims, and {name} has the shape {list(tensor.shape)}"
            )
        return resolve_spec(entry.dims, self.mesh, tensor.dim())

    def _of_scope(self, name: str, rank: int) -> ShardingSpec | None:
        """The layout for the innermost scope with workers in which the module of a tensor runs."""
        module = name
        while module:
            module = module.rpartition(".")[0]
            entry = self.config.scope_for(module)
            signal = registry.get(entry.signal) if entry is not None else None
            if entry is not None and signal is not None and signal.shard is not None:
                return resolve_whole(signal.shard, self._connected, f"{at(signal.source)}signal {entry.signal!r}", rank)
        return None

    def is_cut(self, name: str) -> bool:
        """Whether the section cuts a tensor, over several workers."""
        entry = self.config.spec_for(name) if self.mesh is not None and self.mesh.size > 1 else None
        return entry is not None and any(dim for dim in entry.dims if dim != REST)
