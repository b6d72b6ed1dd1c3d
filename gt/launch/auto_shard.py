"""`gt.auto_shard`: records a step of a program, and plans its layouts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gt.client import active_session
from gt.client.layouts import mesh as make_mesh
from gt.client.step_objects import find_step_objects
from gt.client.step_recorder import record_steps
from gt.client.tracebacks import ends_on_users_line
from gt.core.errors import LayoutError, SettingsError
from gt.launch.calibration import stored_calibration
from gt.launch.plan_search import Candidate, PlanSearch, candidate_meshes
from gt.launch.sharding_plan import Plan
from gt.sharding.calibration import Calibration
from gt.sharding.optimizer.recorded_program import program_of
from gt.sharding.optimizer.simple_solver import AUTO, SimpleSolver
from gt.sharding.spec import DeviceMesh
from gt.signals.config import Config, ModelConfig
from gt.signals.parser import read_config
from gt.signals.registry import registry

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@ends_on_users_line
def auto_shard(
    step: Callable[..., Any],
    *args: Any,
    mesh: DeviceMesh | Sequence[int] | str | None = None,
    memory: int | str | None = None,
    model: torch.nn.Module | None = None,
    constraints: Config | ModelConfig | str | os.PathLike[str] | None = None,
    machine: Calibration | None = None,
    method: str = AUTO,
    seconds: float = 20.0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan the layouts of a program: `plan = gt.auto_shard(step, batch, mesh=(2, 4), memory="16 GiB")`.

    - `step`: an ordinary function of one step: forward, backward and the optimizer's step. It is run twice
    - `mesh`: a mesh, its shape, or "2x4"; without it, the grids over all workers are compared
    - `memory`: the bytes that a worker may hold
    - `model`: the model of the step, if it cannot be found in the function
    - `constraints`: layouts that are fixed: a signals file, or its `model` section; without it, what is configured
    - `machine`: the speeds of the workers; without it, those that `gt.calibrate()` has stored
    - `method`: "auto", "exact" or "fast"; `seconds` limits a linear program

    >>> gt.init(workers=4, mode="shapes")
    >>> model = gt.to(torch.nn.Linear(64, 64))
    >>> plan = gt.auto_shard(lambda x: model(x).sum().backward(), torch.ones(32, 64), mesh="2x2", model=model)
    >>> plan.mesh.shape, plan.gap < 0.01
    ((2, 2), True)
    """
    show = progress or _show_on_terminal()
    limit = None if memory is None else parse_bytes(memory)
    objects = find_step_objects(step, args, model)
    fixed = _fixed_layouts(constraints)
    meshes = _meshes(mesh, fixed)
    show("recording the step")
    steps = record_steps(step, args, objects)
    program = program_of(steps)
    show(f"{len(program.ops)} ops, {len(program.names)} parameters")
    calibration = machine or stored_calibration() or Calibration()
    workers = len(active_session.current().workers)
    solver = SimpleSolver(method, seconds, show)
    search = PlanSearch(steps, program, workers, calibration, limit, fixed, solver, show)
    found: list[Candidate] = [candidate for each in meshes for candidate in search.candidates(each)]
    if not found:
        raise LayoutError(
            f"no layout was found in which a worker holds at most {limit:,} bytes; allow more memory, use more "
            "workers, or smaller batches"
        )
    found.append(search.refine(found, seconds / 5))
    return Plan(search, found, steps, program, calibration, limit, objects)


def parse_bytes(text: int | str) -> int:
    """A number of bytes: 1000, "16 GiB", "500 MB"."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise SettingsError(f"{text!r} is no amount of memory; write it as in '16 GiB' or '500 MB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _meshes(mesh: DeviceMesh | Sequence[int] | str | None, fixed: ModelConfig | None) -> list[DeviceMesh]:
    workers = [info.worker for info in active_session.current().workers]
    if isinstance(mesh, DeviceMesh):
        return [mesh]
    if mesh is None:
        if fixed is not None and fixed.mesh is not None:
            sizes = [size for _, size in fixed.mesh]
            return [make_mesh(sizes, [name for name, _ in fixed.mesh], fixed.workers or ())]
        return candidate_meshes(workers)
    shape = [int(part) for part in mesh.split("x")] if isinstance(mesh, str) else list(mesh)
    return [make_mesh(shape, ("dp", "tp", "pp", "ep")[: len(shape)] if len(shape) > 1 else ("dp",))]


def _fixed_layouts(constraints: Config | ModelConfig | str | os.PathLike[str] | None) -> ModelConfig | None:
    if constraints is None:
        return registry.current().model
    if isinstance(constraints, Config):
        return constraints.model
    if isinstance(constraints, ModelConfig):
        return constraints
    return read_config(Path(constraints), registry.current().signals).model


def _show_on_terminal() -> Callable[[str], None]:
    """Lines on stderr, if a person reads it."""
    if not sys.stderr.isatty():
        return lambda line: None
    return lambda line: print(f"gt: {line}", file=sys.stderr, flush=True)
