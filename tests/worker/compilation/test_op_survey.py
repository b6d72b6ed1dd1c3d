"""All pointwise ops and reductions that are compiled give what torch's kernels give, also at the borders of domains."""

from pathlib import Path

import pytest
import torch

from gt.worker.compilation.compile_server import UntraceableCall, trace
from gt.worker.compilation.compiled_code import CompiledCode
from gt.worker.compilation.inductor_private import compile_graph, find_vector_instructions
from gt.worker.engines.torch_private import load_code
from tests.worker.compilation.op_survey import (
    FLOATS,
    INTEGERS,
    Case,
    call,
    cases_of,
    differences,
    is_compiled,
    surveyed_ops,
    values_of,
)
from tests.worker.compilation.recorded_units import Recorded, answer_of, needs_compiler, record

GROUP = 60  # cases that are compiled together


def record_cases(cases: list[Case]) -> Recorded:
    return record(
        lambda *given: [made for case in cases for made in call(case, given)], values_of(cases[0].dtype)["unit"]
    )


def is_traceable(case: Case) -> bool:
    try:
        trace(record_cases([case]).unit)
    except UntraceableCall:
        return False
    return True


def compile_cases(cases: list[Case], directory: Path) -> tuple[CompiledCode, Recorded]:
    recorded = record_cases(cases)
    traced = trace(recorded.unit)
    path = compile_graph(traced.graph, traced.inputs, 1, directory)
    return CompiledCode(recorded.unit, answer_of(traced, str(path)), load_code(path)), recorded


def find_differences(cases: list[Case], directory: Path) -> list[str]:
    code, recorded = compile_cases(cases, directory)
    found = []
    for name, inputs in values_of(cases[0].dtype).items():
        given = inputs[: len(recorded.unit.inputs)]
        assert code.fits(given)
        made = iter(code(given, recorded.scalars))
        for case in cases:
            for expected in call(case, inputs):
                wrong = differences(case, inputs, next(made), expected)
                if wrong.any():
                    found.append(f"{case}: {int(wrong.sum())} elements of {wrong.numel()} differ for values {name!r}")
    return found


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")  # of torch, when it imports its compiler, and of ops
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_compiled_ops_give_what_torch_gives(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    find_vector_instructions()
    cases = [case for op in surveyed_ops() for case in cases_of(op, dtype) if is_compiled(case) and is_traceable(case)]
    assert len(cases) > GROUP
    found = []
    for start in range(0, len(cases), GROUP):
        directory = tmp_path / str(start)
        directory.mkdir()
        found += find_differences(cases[start : start + GROUP], directory)
    assert not found, "\n".join(found)
