"""Engines, which compute the tensors of a worker. An engine is one file and one line in the table below."""

from __future__ import annotations

from gt.core.errors import SettingsError, nearest
from gt.core.settings import read_settings
from gt.worker.engines.engine import Engine
from gt.worker.engines.numpy_engine import NumPyEngine
from gt.worker.engines.pytorch_engine import PyTorchEngine

ENGINES: dict[str, type[PyTorchEngine] | type[NumPyEngine]] = {"pytorch": PyTorchEngine, "numpy": NumPyEngine}


def make_engine(backend: str, device: str = "", threads: int = 0, *, clears: bool = False) -> Engine:
    """The defaults of `device` and `threads` are the engine's choice and all cores. With `clears`, ops give no memory
    that another session has written."""
    if backend not in ENGINES:
        raise SettingsError(f"unknown backend {backend!r}; {nearest(backend, ENGINES)}")
    return ENGINES[backend](device, threads, read_settings().check_geometry, clears)


__all__ = ["ENGINES", "Engine", "NumPyEngine", "PyTorchEngine", "make_engine"]
