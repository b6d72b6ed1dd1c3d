"""Compiled code without a compile server: the code of a unit is its graph, as it was traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gt.worker.compilation import compiled_blocks, program_compiler
from gt.worker.compilation.compile_server import TracedUnit, UntraceableCall, trace
from gt.worker.compilation.compile_units import CompileAnswer, Compiled, CompileFailed, CompileUnit
from gt.worker.compilation.server_connection import CompileServerConnection
from gt.worker.engines.torch_private import Code


class TracedCode:
    """The graphs of units. With `failure` their code fails after it has begun to write."""

    def __init__(self) -> None:
        self._traced: dict[str, TracedUnit] = {}
        self.failure: Exception | None = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(CompileServerConnection, "submit", lambda connection, unit, take: self._submit(unit, take))
        patch.setattr(compiled_blocks, "load_code", self._load)
        patch.setattr(program_compiler, "find_compiler", lambda: "g++")

    def _submit(self, unit: CompileUnit, take: Callable[[CompileAnswer], None]) -> None:
        try:
            with torch.inference_mode(False):
                traced = trace(unit)
        except UntraceableCall as error:
            take(CompileFailed(unit.key, str(error), error.call))
            return
        self._traced[unit.key] = traced
        take(Compiled(unit.key, unit.key, traced.takes, traced.writes, traced.outputs, 0.0))

    def _load(self, path: Path) -> Code:
        traced = self._traced[str(path)]

        def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
            if self.failure is not None:
                for position in traced.writes:
                    given[traced.takes.index(position) - len(traced.takes)].fill_(7)
                raise self.failure
            return list(traced.graph(*given))

        return run
