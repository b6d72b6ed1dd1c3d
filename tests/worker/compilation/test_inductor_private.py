"""The private parts of torch that compile code: canaries for new versions of torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gt.worker.compilation.compile_server import trace
from gt.worker.compilation.compiled_code import CompiledCode
from gt.worker.compilation.inductor_private import compile_graph, fake_mode, find_vector_instructions, trace_function
from gt.worker.engines.torch_private import load_code
from tests.worker.compilation.recorded_units import answer_of, needs_compiler, record, run_both


def test_a_function_is_traced_on_tensors_without_memory() -> None:
    with fake_mode():
        x = torch.empty(1 << 20, 1 << 10)
        graph = trace_function(lambda x: x + 1, [x])
    assert "torch.ops.aten.add.Tensor" in graph.code


def step(x: torch.Tensor, p: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
    y = torch.softmax(x @ p * 0.5, -1)
    m.lerp_(p, 0.1)
    p.add_(m, alpha=-0.01)
    return [y, y.t(), p]


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of torch, when it imports its compiler
def test_compiled_code_does_what_the_ops_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    inputs = [torch.rand(8, 16), torch.rand(16, 16), torch.rand(16, 16)]
    recorded = record(step, inputs)
    traced = trace(recorded.unit)
    find_vector_instructions()
    path = compile_graph(traced.graph, traced.inputs, 1, tmp_path)
    assert tmp_path in path.parents and os.access(path, os.R_OK)
    code = CompiledCode(recorded.unit, answer_of(traced), load_code(path))
    assert run_both(step, inputs, code, recorded.scalars) is None

    def with_other_numbers(x: torch.Tensor, p: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
        y = torch.softmax(x @ p * 0.25, -1)
        m.lerp_(p, 0.7)
        p.add_(m, alpha=-0.03)
        return [y, y.t(), p]

    assert run_both(with_other_numbers, inputs, code, (0.25, 0.7, -0.03)) is None
