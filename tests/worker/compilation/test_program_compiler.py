"""`compile: true`: the segments of a scope are compiled in the background, and replaced by their code."""

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import gt
from tests.worker.compilation.recorded_units import needs_compiler


@pytest.fixture
def compiled_scope(monkeypatch: pytest.MonkeyPatch, no_signals: None) -> Iterator[None]:
    monkeypatch.setenv("GT_CHECK_GEOMETRY", "0")
    monkeypatch.setenv("GT_COMPILE_NICE", "0")
    gt.init()
    gt.register_config("layer", gt.SignalConfig(compile=True))
    yield
    gt.shutdown()


def repeat_until(step: Callable[[], object], is_done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, f"it takes too long: {gt.debug.get_worker_stats()}"
        step()
        time.sleep(0.02)


def compiled_runs() -> int:
    return min(stats.compiled_runs for stats in gt.debug.get_worker_stats().values())


def layer(x: torch.Tensor, state: torch.Tensor, rate: float) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(x * 1.5 + 0.25)
    state.lerp_(x, rate)
    return x.softmax(-1) - state


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(900)
def test_code_replaces_the_ops_of_a_scope_and_takes_numbers_that_change(compiled_scope: None) -> None:
    x, plain = torch.rand(8, 8), torch.zeros(8, 8)
    moved, state = gt.to(x), gt.zeros(8, 8)
    rates = iter(range(1, 1 << 30))

    def step() -> None:
        rate = 1.0 / (1 + next(rates))
        with gt.signal.context("layer"):
            y = layer(moved, state, rate)
        torch.testing.assert_close(y.cpu(), layer(x, plain, rate))

    repeat_until(step, lambda: compiled_runs() >= 5, 800)
    torch.testing.assert_close(state.cpu(), plain)
    assert gt.debug.get_worker_stats()[0].compiled == 1


def test_a_worker_without_a_compiler_says_so_once(
    compiled_scope: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    x, state = gt.ones(4, 4), gt.zeros(4, 4)
    for _ in range(8):
        with gt.signal.context("layer"):
            layer(x, state, 0.5).sum().item()
    (told,) = [record.getMessage() for record in caplog.records if "compile: true needs" in record.getMessage()]
    assert told.startswith(
        "signal 'layer': compile: true needs a C++ compiler on the worker: none found (g++, clang++, $CXX)"
    )
    assert f"{os.path.basename(__file__)}:" in told
    assert compiled_runs() == 0


def test_without_compile_nothing_is_compiled(compiled_scope: None) -> None:
    x, state = gt.ones(4, 4), gt.zeros(4, 4)
    for _ in range(8):
        layer(x, state, 0.5).sum().item()
    assert gt.debug.get_worker_stats()[0].compiled == 0


def test_an_op_that_fails_in_a_compiled_scope_names_its_line(compiled_scope: None) -> None:
    rows, places = gt.ones(4, 4), gt.tensor([5])
    with gt.signal.context("layer"):
        for _ in range(4):
            y = rows
            for _ in range(8):
                y = torch.tanh(y * 2.0)
            picked = torch.index_select(y, 0, places)
            with pytest.raises(RuntimeError, match="index_select"):
                picked.sum().item()
            torch.testing.assert_close(y.cpu().shape, torch.Size([4, 4]))
