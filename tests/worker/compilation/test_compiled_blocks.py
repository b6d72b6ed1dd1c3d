"""Compiled blocks in segments: when code replaces ops, how it is counted, and what happens when it fails."""

from collections.abc import Callable, Iterator

import pytest
import torch

import gt
from gt.core.tables import CODE
from gt.worker.compilation.program_compiler import RUNS_BY_ITSELF
from tests.worker.compilation.traced_code import TracedCode


@pytest.fixture
def traced_code(monkeypatch: pytest.MonkeyPatch, no_signals: None) -> Iterator[TracedCode]:
    code = TracedCode()
    code.install(monkeypatch)
    monkeypatch.setenv("GT_CHECK_GEOMETRY", "0")
    yield code
    gt.shutdown()


@pytest.fixture
def compiled_scopes(traced_code: TracedCode) -> TracedCode:
    gt.init()
    for name in ("layer", "other"):
        gt.register_config(name, gt.SignalConfig(compile=True))
    return traced_code


def counts() -> tuple[int, int]:
    stats = gt.debug.get_worker_stats()[0]
    return stats.compiled, stats.compiled_runs


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(x * 1.5 + 0.25)
    return x


def test_runs_of_ops_that_repeat_are_compiled_without_a_signal(
    traced_code: TracedCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GT_AUTO_COMPILE", "1")
    gt.init()
    x = torch.rand(4, 4)
    moved = gt.to(x)
    for run in range(RUNS_BY_ITSELF + 20):
        torch.testing.assert_close(chain(moved).cpu(), chain(x))
        if run < RUNS_BY_ITSELF:
            assert counts() == (0, 0)
    compiled, runs = counts()
    assert compiled >= 1 and runs >= 5


def repeat_until_code_runs(step: Callable[[], object], runs: int = 4) -> None:
    for _ in range(100):
        if counts()[1] >= runs:
            return
        step()
    raise AssertionError(f"code does not run: {gt.debug.get_worker_stats()}")


def test_equal_runs_of_ops_are_counted_once(compiled_scopes: TracedCode) -> None:
    x = gt.ones(4, 4)

    def step() -> None:
        for name in ("layer", "other"):
            with gt.signal.context(name):
                chain(x).cpu()

    repeat_until_code_runs(step, 8)
    assert counts()[0] == 1


def test_ops_run_in_place_of_code_that_fails_without_writing(compiled_scopes: TracedCode) -> None:
    x = gt.ones(4, 4)
    expected = chain(torch.ones(4, 4))

    def step() -> None:
        with gt.signal.context("layer"):
            y = chain(x)
        torch.testing.assert_close(y.cpu(), expected)

    repeat_until_code_runs(step)
    compiled_scopes.failure = RuntimeError("no memory")
    runs = counts()[1]
    step()
    assert counts()[1] == runs


def test_tensors_that_failing_code_has_begun_to_write_have_failed(compiled_scopes: TracedCode) -> None:
    x, state, other = gt.ones(4, 4), gt.zeros(4, 4), gt.ones(4, 4)

    def step() -> torch.Tensor:
        with gt.signal.context("layer"):
            y = chain(x)
            state.lerp_(y, 0.5)
            return (y * state).cpu()

    repeat_until_code_runs(step)
    compiled_scopes.failure = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        step()
    with pytest.raises(RuntimeError, match="no memory"):
        state.cpu()
    torch.testing.assert_close(x.cpu() + other.cpu(), torch.full((4, 4), 2.0))


def train_with_dropout(*, compiles: bool) -> list[torch.Tensor]:
    gt.init(workers=2, mode="virtual")
    rows = gt.ShardConfig(axis=0, workers=[0, 1])
    gt.register_config("forward", gt.SignalConfig(shard=rows, backward_signal="backward", compile=compiles))
    gt.register_config("backward", gt.SignalConfig(shard=rows, compile=compiles))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.LayerNorm(16)]
    model = gt.to(torch.nn.Sequential(*layers, torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Dropout(0.3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = gt.to(torch.randn(8, 8))
    for _ in range(20):
        optimizer.zero_grad()
        with gt.signal.context("forward"):
            loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        loss.item()
    assert bool(counts()[1]) == compiles
    trained = [parameter.detach().cpu() for parameter in model.parameters()]
    gt.shutdown()
    return trained


def test_dropout_in_a_compiled_scope_draws_the_same_numbers(traced_code: TracedCode) -> None:
    torch.testing.assert_close(train_with_dropout(compiles=True), train_with_dropout(compiles=False))


def test_the_way_of_ops_to_code_is_a_table(compiled_scopes: TracedCode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", CODE)
    x = gt.ones(4, 4)

    def step() -> None:
        with gt.signal.context("layer"):
            chain(x).cpu()

    repeat_until_code_runs(step)
    rows = [record.message.splitlines()[-1].split() for record in caplog.records if record.name == CODE]
    assert [row[1] for row in rows[:3]] == ["asked", "compiled", "used"] and rows[0][2:] == rows[1][2:8] + ["-"] * 4
