"""Starts client, dispatcher and workers: in one process, with local worker processes, by joining a server, or on the
machines of a Ray or Dask cluster.

The only package that imports several roles. Launchers are loaded when they are used, and the processes that they start
on other machines load neither torch nor the client.

>>> with gt.launch.ray(workers=2):
...     print(gt.ones(3).sum().item())
3.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gt.launch.clusters import Cluster as Cluster
    from gt.launch.dask_cluster import dask as dask
    from gt.launch.ray_cluster import ray as ray

_MODULE_OF = {"Cluster": "gt.launch.clusters", "dask": "gt.launch.dask_cluster", "ray": "gt.launch.ray_cluster"}

__all__ = ["Cluster", "dask", "ray"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gt.launch' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value
