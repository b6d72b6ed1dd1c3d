"""`gt.auto_shard`: records a step of a program, and plans its layouts."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gt.client import active_session
from gt.client.compilation.compiled_function import CompiledFunction
from gt.client.layouts import mesh as make_mesh
from gt.client.model_layout import check_layouts
from gt.client.step_recorder import find_step_objects, record_steps, require_known_memory
from gt.core.errors import LayoutError, SessionError, SettingsError
from gt.core.messages import hosts_of
from gt.core.settings import read_settings
from gt.core.tracebacks import ends_on_users_line
from gt.launch.plan_search import Candidate, PlanSearch, candidate_meshes
from gt.launch.sharding_plan import Plan
from gt.monitor.progress import open_display
from gt.sharding.calibration import Calibration, stored_calibration
from gt.sharding.solver.recorded_program import program_of
from gt.sharding.solver.simple_solver import AUTO, SimpleSolver
from gt.sharding.spec import DeviceMesh
from gt.signals.config import Config, ModelConfig
from gt.signals.parser import read_config
from gt.signals.registry import registry
from gt.wire.long_waits import told_in_background

_AXES = ("dp", "tp", "pp", "ep")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@ends_on_users_line
def auto_shard(
    step: Callable[..., Any],
    *args: Any,
    mesh: DeviceMesh | Sequence[int] | int | str | None = None,
    memory: float | str | None = None,
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
    - `progress`: is called with lines that tell how far planning is; without it, a terminal or a notebook shows them

    >>> gt.init(workers=4, mode="shapes")
    >>> model = gt.to(torch.nn.Linear(64, 64))
    >>> plan = gt.auto_shard(lambda x: model(x).sum().backward(), torch.ones(32, 64), mesh="2x2", model=model)
    >>> plan.mesh.shape, plan.gap < 0.01
    ((2, 2), True)
    """
    with _told(progress) as show:
        return _plan(step, args, mesh, memory, model, constraints, machine, method, seconds, show)


def _plan(
    step: Callable[..., Any],
    args: Sequence[Any],
    mesh: DeviceMesh | Sequence[int] | int | str | None,
    memory: float | str | None,
    model: torch.nn.Module | None,
    constraints: Config | ModelConfig | str | os.PathLike[str] | None,
    machine: Calibration | None,
    method: str,
    seconds: float,
    show: Callable[[str], None],
) -> Plan:
    limit = None if memory is None else parse_bytes(memory)
    solver = SimpleSolver(method, seconds, show)
    objects = find_step_objects(step, args, model)
    fixed = _fixed_layouts(constraints)
    calibration = machine or stored_calibration() or Calibration()
    meshes = _meshes(mesh, fixed, are_axes_alike=not calibration.axes)
    show("recording the step")
    is_compiled = isinstance(step, CompiledFunction)
    steps = record_steps(step.uncompiled() if isinstance(step, CompiledFunction) else step, args, objects)
    if limit is not None:
        require_known_memory(steps)
    if fixed is not None:
        check_layouts(objects.model, fixed, meshes[0])
    program = program_of(steps)
    if not program.names:
        raise SessionError(
            f"the step does not use the parameters of {type(objects.model).__name__}; name the model of the step with "
            "model="
        )
    show(f"{len(program.ops)} ops, {len(program.names)} parameters")
    hosts = hosts_of(active_session.current().workers)
    search = PlanSearch(steps, program, hosts, calibration, limit, fixed, solver, show)
    found: list[Candidate] = [candidate for each in meshes for candidate in search.candidates(each)]
    found.append(search.refine(found, seconds / 5))
    if not search.fits(found[-1]):
        raise LayoutError(
            f"no layout was found in which a worker holds at most {limit:,} bytes; the smallest of those compared "
            f"takes {found[-1].cost.peak:,}. Allow more memory, use more workers, or smaller batches"
        )
    fitting = list(filter(search.fits, found))
    return Plan(search, fitting, steps, program, calibration, limit, objects, is_compiled=is_compiled)


def parse_bytes(amount: float | str) -> int:
    """A number of bytes: 1000, 16e9, "16 GiB", "500 MB"."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)\s*", amount) if isinstance(amount, str) else None
    if match is not None and match[2].upper() in _UNITS:
        amount = float(match[1]) * _UNITS[match[2].upper()]
    if not isinstance(amount, int | float) or not 1 <= amount < math.inf:
        raise SettingsError(f"{amount!r} is no amount of memory; write it as in '16 GiB' or '500 MB'")
    return int(amount)


def _meshes(
    mesh: DeviceMesh | Sequence[int] | int | str | None, fixed: ModelConfig | None, *, are_axes_alike: bool
) -> list[DeviceMesh]:
    if isinstance(mesh, DeviceMesh):
        return [mesh]
    if mesh is None:
        if fixed is not None and fixed.mesh is not None:
            sizes = [size for _, size in fixed.mesh]
            return [
                make_mesh(
                    sizes, [name for name, _ in fixed.mesh], fixed.workers if isinstance(fixed.workers, tuple) else ()
                )
            ]
        return candidate_meshes(hosts_of(active_session.current().workers), are_axes_alike=are_axes_alike)
    shape = _parse_shape(mesh) if isinstance(mesh, str) else [mesh] if isinstance(mesh, int) else list(mesh)
    return [make_mesh(shape, _AXES[: len(shape)] if len(shape) <= len(_AXES) else ())]


def _parse_shape(text: str) -> list[int]:
    """The shape that "2x4" says."""
    try:
        return [int(part) for part in text.split("x")]
    except ValueError:
        raise SettingsError(f"{text!r} is no shape of a mesh; write it as in '2x4', or give it as (2, 4)") from None


def _fixed_layouts(constraints: Config | ModelConfig | str | os.PathLike[str] | None) -> ModelConfig | None:
    if constraints is None:
        return registry.current().model
    if isinstance(constraints, Config):
        return constraints.model
    if isinstance(constraints, ModelConfig):
        return constraints
    if not isinstance(constraints, str | os.PathLike):
        raise SettingsError(
            f"constraints={constraints!r} are no layouts: give a gt.ModelConfig, or the path of a signals file"
        )
    return read_config(Path(constraints), registry.current().signals).model


@contextmanager
def _told(progress: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Inside, lines go to the user's function or, if planning takes long, to the line of a terminal or a notebook."""
    if progress is not None:
        yield progress
        return
    last = deque(["the step"], maxlen=1)
    with told_in_background(open_display(read_settings().progress), lambda: f"planning: {last[0]}"):
        yield last.append
